"""Test of what messages advise: each key of a job's YAML that the library names exists."""

import ast
import dataclasses
import gc
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import undula
from undula.config.job import JobSpec
from undula.config.yaml_file import dataclasses_in

SECTIONS = {
    section: {field.name for owner in dataclasses_in(hint) for field in dataclasses.fields(owner)}
    for section, hint in typing.get_type_hints(JobSpec).items()
    if dataclasses_in(hint)
}
"""Keys by section of a job's YAML."""
OTHERS = {
    "plan.batch_size",  # the key of others, which is refused with the key to use
    "horovod.torch",  # a module
    "schedule.group_rates", "schedule.scheduler",  # names of values in the state
    "schedule.warmup_",  # the beginning of several keys
    "data.new",  # a file
}  # fmt: skip
"""Texts of the library that look like a key and are none."""


def texts_of_the_library() -> Iterator[str]:
    for file in Path(undula.__file__).parent.rglob("*.py"):
        for node in ast.walk(parsed(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def parsed(source: str) -> ast.AST:
    """Parse without the garbage collector: in Python 3.11, a finalizer that prints a traceback parses as well, and this one then fails."""
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def test_every_key_that_a_message_names_exists() -> None:
    key = re.compile(rf"(?<![\w./])({'|'.join(SECTIONS)})\.([a-z]\w*)")
    named = [found for text in texts_of_the_library() for found in key.findall(text)]
    assert len(named) > 200
    unknown = {f"{section}.{name}" for section, name in named if name not in SECTIONS[section]}
    assert unknown - OTHERS == set()
