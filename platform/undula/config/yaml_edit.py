"""Changes of values in the text of a YAML file, which keep its comments and everything else as it is."""

import json
from collections.abc import Mapping
from typing import Any

import yaml


def with_values(text: str, values: Mapping[str, Any]) -> str:
    """Return the text of a YAML mapping with other values.

    Args:
        text: Text of the file.
        values: Values by dotted key. Sections that are missing are added at the end.
    """
    for key, value in values.items():
        text = _with_value(text, key.split("."), json.dumps(value))
    return text


def _with_value(text: str, path: list[str], value: str) -> str:
    node, depth = yaml.compose(text), 0
    if node is None:
        return f"{text}{_break_after(text)}{_line('', path, value)}"
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return _replaced(text, node, _flow(path, value))
    while True:
        child = next((child for key, child in node.value if key.value == path[depth]), None)
        if child is None:
            return _with_new_key(text, node, path[depth:], value)
        depth += 1
        if depth == len(path):
            return _replaced(text, child, value)
        if not isinstance(child, yaml.MappingNode) or not child.value:
            return _replaced(text, child, _flow(path[depth:], value))
        node = child


def _replaced(text: str, node: yaml.Node, value: str) -> str:
    begin, end = node.start_mark.index, node.end_mark.index
    if begin == end and text[:begin].endswith(":"):  # the key had no value
        value = f" {value}"
    if isinstance(node, yaml.CollectionNode):
        end = _end_of(node)
    return f"{text[:begin]}{value}{text[end:]}"


def _with_new_key(text: str, node: yaml.MappingNode, path: list[str], value: str) -> str:
    """Return the text with a key at the end of a mapping that is not empty."""
    first_key, _ = node.value[0]
    _, last = node.value[-1]
    if node.flow_style:
        end = _end_of(last)
        return f"{text[:end]}, {path[0]}: {_flow(path[1:], value)}{text[end:]}"
    end = text.find("\n", _end_of(last))
    before, rest = (f"{text}\n", "") if end < 0 else (text[: end + 1], text[end + 1 :])
    return f"{before}{_line(' ' * first_key.start_mark.column, path, value)}{rest}"


def _break_after(text: str) -> str:
    """Return the line break that a text lacks at its end."""
    return "" if not text or text.endswith("\n") else "\n"


def _end_of(node: yaml.Node) -> int:
    """Return the index after the last character of a node. A block ends only where the next token begins."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node.end_mark.index


def _flow(path: list[str], value: str) -> str:
    for key in reversed(path):
        value = f"{{{key}: {value}}}"
    return value


def _line(indent: str, path: list[str], value: str) -> str:
    return f"{indent}{path[0]}: {_flow(path[1:], value)}\n"
