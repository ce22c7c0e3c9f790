"""Loading of YAML files as instances of a dataclass, with overrides and the origin of each value.

The message of an error is one sentence with the file and line, the key, the given value, and the accepted values.
"""

import dataclasses
import difflib
import json
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from undula.config.environment import with_variables
from undula.config.secrets import has_secret, hide_secrets
from undula.errors import NAME, SpecError, one_line

FILES = "UNDULA_FILES"
"""Environment variable of a job's driver with the texts of YAML files that its machine may not have, as JSON by absolute path."""

OPTIONS = {
    key: f"give it to the command as the option {option}"
    for key, option in {
        "script": "--script FILE",
        "project": "--project FOLDER",
        "address": "--address URL",
        "env": "--env NAME=VALUE",
        "runtime_env": "--runtime-env FILE",
        "fresh": "--fresh",
    }.items()
}
"""Fixes for keys that are options of `undula run` and `undula study`."""


def load_file(
    owner: Any,
    file: Path,
    overrides: Sequence[str],
    what: str,
    keys: str,
    origin: Callable[[str], str] = lambda _key: "command line",
    fix: Callable[[Mapping[str, Any], str], str | None] = lambda _tree, _key: None,
    settings: Callable[[Mapping[str, Any]], Mapping[str, "Setting"]] = lambda _tree: {},
    sections: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Any, "Where"]:
    """Load a file as an instance of a dataclass.

    Args:
        owner: Checked dataclass to load.
        file: YAML file.
        overrides: Overrides as `key.sub=value`, with the value written as in YAML.
        what: Kind of file, such as "a job's YAML", for messages.
        keys: Required keys of such a file, for messages.
        origin: Callback that returns the origin of an override from its key, for messages.
        fix: Callback that returns the fix for an unknown dotted key in a tree; None to suggest the closest known key.
        settings: Callback that returns values from elsewhere by dotted key, given the tree of the file with its overrides. It is called
            when all keys are known to be right, because it may take long.
        sections: Dataclasses of sections that are plain mappings in `owner`, by key.

    Returns:
        The instance, and the origins of its values.

    Raises:
        SpecError: The file is not valid.
    """
    tree, origins = read_yaml(file, what, keys)
    for override in overrides:
        _apply_override(tree, origins, override, origin(override.partition("=")[0]))
    tree, variables = with_variables(tree, Where(file, origins))
    where = Where(file, origins, variables)
    refuse_unknown_keys(tree, owner, (), where, lambda key: fix(tree, key) or OPTIONS.get(key))
    for key, section in sections.items():
        refuse_unknown_keys(tree.get(key), section, (key,), where)
    for key, setting in settings(tree).items():
        _add_setting(tree, origins, key, setting)
    return validated(owner, tree, (), where), where


@dataclass(frozen=True)
class Setting:
    """Value that neither the file nor an override gives."""

    value: Any
    origin: str
    """Place where the user has set it, for messages."""
    instead: str | None = None
    """What the user sets there to change it; None if a message has no better advice than to remove the key of the job."""


_SafeLoader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""Loader of libyaml, which is eight times faster than PyYAML's own. A study reads its job once for each trial."""


class _Yaml12Loader(_SafeLoader):  # type: ignore[valid-type, misc]
    """A loader that reads 3e-4 as a number, as in YAML 1.2. PyYAML implements YAML 1.1, in which it is a string."""


_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def files_for_job(script: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the environment variable with which the driver of a job finds YAML files that are not in the folder of its script.

    A cluster gets that folder only.
    """
    texts = {str(file.absolute()): file.read_text() for file in files if file.absolute().parent != script.parent}
    return {FILES: json.dumps(texts)} if texts else {}


def read_yaml(file: Path, what: str, keys: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the content of a file, and the origin of each of its values by dotted key. `load_file` explains the arguments.

    Raises:
        SpecError: The file is not a mapping in YAML.
    """
    try:
        text = json.loads(os.environ.get(FILES, "{}")).get(str(file)) or file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=_Yaml12Loader)
        tree = _without_aliases(yaml.load(text, Loader=_Yaml12Loader))
    except OSError as error:
        raise SpecError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{file} is not UTF-8 text; give {what}") from error
    except yaml.YAMLError as error:
        reason = f": {one_line(error)}" if _is_named_as_yaml(file) else f"; {_fix_of_other_file(file, what)}"
        raise SpecError(f"{file} is not YAML{reason}") from error
    except RecursionError:
        raise SpecError(f"{file} has an anchor that contains itself, or is nested too deeply; remove that") from None
    except ValueError as error:  # a date that does not exist, or a number with thousands of digits
        raise SpecError(
            f"{file} has a value that is neither a date nor a number, but looks like one: {error}; quote it"
        ) from None
    if tree is None:
        raise SpecError(f"{file} is empty: {what} is a mapping with the keys {keys}, ...")
    if not isinstance(tree, dict) or not isinstance(root, yaml.MappingNode):
        if not _is_named_as_yaml(file):
            raise SpecError(f"{file} is not YAML; {_fix_of_other_file(file, what)}")
        raise SpecError(f"{file} holds {type(tree).__name__}: {what} is a mapping with the keys {keys}, ...")
    return tree, dict(_origins(root, file, ""))


def _without_aliases(node: Any) -> Any:
    """Return a copy in which what an alias repeats is there several times, so that an override changes one of them."""
    if isinstance(node, dict):
        return {key: _without_aliases(value) for key, value in node.items()}
    return [_without_aliases(value) for value in node] if isinstance(node, list) else node


def _is_named_as_yaml(file: Path) -> bool:
    return file.suffix in ("", ".yaml", ".yml", ".json")


def _fix_of_other_file(file: Path, what: str) -> str:
    """Return the fix for a file that is not meant to be YAML, such as the script of a job."""
    beside = file.with_suffix(".yaml")
    return f"give {beside}, which lies beside it" if beside.is_file() else f"give {what}"


def _origins(node: yaml.MappingNode, file: Path, prefix: str) -> list[tuple[str, str]]:
    """Return (dotted key, "file:line") of each value in a mapping."""
    origins = []
    given: set[str] = set()
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        if path in given:
            raise SpecError(f"{file}:{key.start_mark.line + 1}: {path} is given twice; keep one")
        given.add(path)
        origins.append((path, f"{file}:{key.start_mark.line + 1}"))
        if isinstance(value, yaml.MappingNode):
            origins += _origins(value, file, f"{path}.")
    return origins


def _apply_override(tree: dict[str, Any], origins: dict[str, str], override: str, origin: str) -> None:
    """Set the value of an override in the tree, and record its origin."""
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"\w[\w-]*(\.\w[\w-]*)*", key):
        shown = f"{key}=..." if has_secret(override) else override
        raise SpecError(f"{origin}: {shown!r} is not an override; write key.sub=value")
    try:
        value = yaml.load(text, Loader=_Yaml12Loader)
    except (yaml.YAMLError, RecursionError):
        raise SpecError(f"{origin}: the value of {key} is not YAML: {_shown(key, text)!r}") from None
    except ValueError as error:
        raise SpecError(
            f"{origin}: the value of {key} is neither a date nor a number, but looks like one: {error}; quote it"
        ) from None
    *parents, leaf = key.split(".")
    branch = tree
    for depth, parent in enumerate(parents):
        rest = ".".join([*parents[depth:], leaf])
        if rest in branch:  # a mapping may have dotted keys itself, as a study's overrides do
            parents, leaf = parents[:depth], rest
            break
        branch = branch.setdefault(parent, {})
        if not isinstance(branch, dict):
            shown = _shown(".".join(parents[: depth + 1]), branch)
            raise SpecError(
                f"{origin}: {key} cannot be set: {'.'.join(parents[: depth + 1])} is {shown!r}, not a mapping"
            )
    if parents[:1] == ["config"] and leaf not in branch:
        _refuse_misspelt(key, leaf, branch, origin)
    branch[leaf] = value
    for path in [path for path in origins if path.startswith(f"{key}.")]:
        del origins[path]
    origins[key] = origin
    for path, _ in flatten(value, f"{key}.") if isinstance(value, dict) else []:
        origins[path] = origin


def _refuse_misspelt(key: str, leaf: str, branch: Mapping[str, Any], origin: str) -> None:
    """Refuse an override of a key that the script's section of the file lacks, but that is almost one that it has."""
    others = [str(each) for each in branch if re.sub(r"\d", "", str(each)) != re.sub(r"\d", "", leaf)]
    if close := difflib.get_close_matches(leaf, others, n=1, cutoff=0.8):
        raise SpecError(
            f"{origin}: unknown key {key}: did you mean {close[0]}? If it is another one, add it to the file"
        )


def _add_setting(tree: dict[str, Any], origins: dict[str, str], key: str, setting: Setting) -> None:
    """Set a value in the tree, and record its origin.

    Raises:
        SpecError: The tree has another value.
    """
    known = dict(flatten(tree))
    if key in known and known[key] != setting.value:
        raise SpecError(
            f"{origins[key]}: {key} is {json.dumps(_shown(key, known[key]))}, but {setting.origin} makes it "
            f"{json.dumps(_shown(key, setting.value))}; remove {key}"
            + (f", and set {setting.instead} in its place" if setting.instead else "")
        )
    if key not in known:
        _apply_override(tree, origins, f"{key}={json.dumps(setting.value)}", setting.origin)


@dataclass(frozen=True)
class Where:
    """Origins of the values in a file."""

    file: Path
    origins: Mapping[str, str]
    """Origin of each given value by dotted key."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to which values refer as ${env:NAME}."""

    def __call__(self, path: Sequence[str]) -> str:
        """Return the origin of a key, or else of the nearest key above it, or else of the first one below it, or else the file."""
        for length in range(len(path), 0, -1):
            if origin := self.origins.get(".".join(path[:length])):
                return origin
        below = ".".join((*path, ""))
        return next((origin for key, origin in self.origins.items() if path and key.startswith(below)), str(self.file))


def refuse_unknown_keys(
    tree: Any, owner: Any, path: tuple[str, ...], where: Where, fix: Callable[[str], str | None] = lambda _key: None
) -> None:
    """Refuse the first key of a tree that is not a field of its dataclass.

    Args:
        tree: Content of the YAML below `path`.
        owner: Dataclass of the tree.
        path: Keys above the tree; empty for the whole file.
        where: Origins of the tree's values.
        fix: Callback that returns the fix for an unknown dotted key; None to suggest the closest known key.

    Raises:
        SpecError: The tree has such a key.
    """
    if not (isinstance(tree, Mapping) and dataclasses.is_dataclass(owner)):
        return
    known = typing.get_type_hints(owner)
    for key, value in tree.items():
        here = (*path, str(key))
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            usual = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(sorted(known))}"
            raise SpecError(f"{where(here)}: unknown key {'.'.join(here)}: {fix('.'.join(here)) or usual}")
        for part in dataclasses_in(known[key]):
            for item in value if isinstance(value, list) else [value]:
                refuse_unknown_keys(item, part, here, where, fix)


def dataclasses_in(annotation: Any) -> list[Any]:
    """Return the dataclasses in an annotation: `Layer | None` and `tuple[Layer, ...]` contain Layer."""
    if dataclasses.is_dataclass(annotation):
        return [annotation]
    return [dataclass for part in typing.get_args(annotation) for dataclass in dataclasses_in(part)]


def validated(owner: Any, tree: Any, path: tuple[str, ...], where: Where) -> Any:
    """Return a tree as an instance of its dataclass.

    Args:
        owner: Dataclass of the tree.
        tree: The tree.
        path: Keys above the tree.
        where: Origins of the tree's values.

    Raises:
        SpecError: The tree is not valid.
    """
    try:
        text = json.dumps(tree)
    except (TypeError, ValueError):
        odd = next((key for key, value in flatten(tree) if not _is_json(value)), "a key")
        raise SpecError(
            f"{where(odd.split('.'))}: {odd} is not text, a number, a list or a mapping; quote it"
        ) from None
    try:
        return TypeAdapter(owner).validate_json(text, strict=True)
    except ValidationError as error:
        first, *rest = error.errors(include_url=False)
        others = [other for other in rest if _keys(other) != _keys(first)]
        alternatives = [other["msg"].removeprefix("Input should be ") for other in rest if other not in others]
        more = f" (and {len(others)} more)" if others else ""
        raise SpecError(" or ".join([_sentence(first, path, where), *alternatives]) + more) from None


def _keys(error: ErrorDetails) -> tuple[str, ...]:
    """Return the keys of the value that an error is about, without the names of the types that were tried."""
    parts = (str(part) for part in error["loc"])
    return tuple(part for part in parts if not part.startswith(("function-", "constrained-", "literal[")))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _sentence(error: ErrorDetails, path: tuple[str, ...], where: Where) -> str:
    """Return one of pydantic's errors as a message with the origin, the key, the value, and the accepted values."""
    here = (*path, *_keys(error))
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        key = re.match(r"[\w.]*", message)  # messages of this package begin with the key that they are about
        about = (*here, *(key[0] if key else "").split("."))
        return f"{where(about)}: {''.join(f'{part}.' for part in here)}{message}"
    if error["type"].startswith("missing"):
        return f"{where(here[:-1])}: {'.'.join(here)} is missing; add it"
    accepted = error["msg"].replace("Input should be", "it should be").replace("String should", "it should")
    accepted = accepted.replace("an object", "a mapping").replace("a valid array", "a list")
    if error.get("ctx", {}).get("pattern") == NAME:
        accepted = "it should have only letters, digits, '.', '_' and '-', and begin with a letter or a digit"
    return f"{where(here)}: {'.'.join(here)} is {json.dumps(_shown('.'.join(here), error['input']))}: {accepted}"


def _shown(key: str, value: Any) -> Any:
    """Return a value for a message, without secrets."""
    return hide_secrets({key: value})[key]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a tree by dotted key, such as ("plan.seed", 0). An empty mapping is a leaf."""
    leaves = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves += flatten(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves
