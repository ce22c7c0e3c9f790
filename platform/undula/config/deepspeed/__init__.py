"""Conversion of a DeepSpeed configuration to the keys of a job's YAML. Every key of it is converted, or named with a reason."""

import json
import textwrap
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from undula.config.deepspeed.convert import convert
from undula.config.deepspeed.reader import Conversion, in_one_line
from undula.errors import SpecError, one_line

_WIDTH = 110
"""Maximum number of characters in a line of a comment."""


def load(file: Path, virtual_workers: int | None = None) -> Conversion:
    """Convert a file.

    Args:
        file: DeepSpeed's JSON.
        virtual_workers: Number of virtual workers; by default, the sizes of the batch decide.

    Raises:
        SpecError: The file is not a valid configuration. The message names the file, the key and the fix.
    """
    fix = "give the JSON file that DeepSpeed reads"
    try:
        config = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
        if not isinstance(config, dict):
            raise SpecError(f"there are no keys in braces; {fix}")
        return convert(config, virtual_workers)
    except OSError as error:
        raise SpecError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{file} is not JSON ({one_line(error)}); {fix}") from error
    except SpecError as error:
        raise SpecError(f"{file}: {error}") from error


def as_yaml(conversion: Conversion, file: str) -> str:
    """Return a job's YAML without its name and its data, with all sentences in comments. `file` is the name of the configuration."""
    lines = [
        f"# The equivalent of {in_one_line(file)}. Add a name, and the data unless the script gives them to run.dataset(), and run it with "
        "--script.",
        "# name: my-run",
        "# data: {train: s3://bucket/train, validation: s3://bucket/validation}",
        *_notes("Keys that are missing:", conversion.missing),
    ]
    for section, keys in groupby(conversion.settings, lambda key: key.rpartition(".")[0]):
        parents = section.split(".")
        lines += [f"{'  ' * depth}{parent}:" for depth, parent in enumerate(parents)]
        for key in keys:
            value, origin = conversion.settings[key]
            line = f"{'  ' * len(parents)}{key.rpartition('.')[2]}: {_scalar(value)}"
            lines.append(f"{line:<26}  # {origin}")
    lines += _notes("Keys that do not do exactly the same:", conversion.differences)
    lines += _notes("Keys that are not converted:", conversion.left_out)
    return "\n".join(lines) + "\n"


def _notes(title: str, notes: Mapping[str, str]) -> list[str]:
    """Return the lines of a comment with sentences about keys; none if there are none."""
    lines = ["", f"# {title}"] if notes else []
    for key, reason in notes.items():
        text = f"{in_one_line(key)}: {reason}."
        lines += textwrap.wrap(text, _WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False)
    return lines


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise SpecError(f"{in_one_line(repeated)} is given twice; remove one of them")
    return dict(pairs)


def _scalar(value: Any) -> str:
    """Return a value as YAML in one line. Strings other than plain words are quoted."""
    style = '"' if isinstance(value, str) and not value.isidentifier() else None
    text: str = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=2**31)
    return text.removesuffix("...\n").strip()
