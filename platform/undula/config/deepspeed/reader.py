"""Reading of a DeepSpeed configuration: the values that its keys accept, and a record of what becomes of each key."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from undula.config.deepspeed.reasons import AUTO, REASONS, UNKNOWN
from undula.errors import SpecError


@dataclass(frozen=True)
class Conversion:
    """Keys of a job's YAML that do what a DeepSpeed configuration does."""

    settings: Mapping[str, tuple[Any, str]]
    """Value and origin of each dotted key."""
    missing: Mapping[str, str]
    """Sentence for each key that the configuration lacks and that the job needs."""
    differences: Mapping[str, str]
    """Sentence for each converted key of DeepSpeed that does not do exactly the same."""
    left_out: Mapping[str, str]
    """Sentence for each key of DeepSpeed that has no equivalent."""


@dataclass(frozen=True)
class Kind:
    """Values that a key accepts."""

    text: str
    accepts: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


SECTION = Kind("an object", lambda value: isinstance(value, dict))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
COUNT = Kind("an integer above 0", lambda value: _is_integer(value) and value > 0)
STEPS = Kind("an integer of at least 0", lambda value: _is_integer(value) and value >= 0)
DEVICE = Kind('"none", "cpu" or "nvme"', lambda value: value in ("none", "cpu", "nvme"))
STAGE = Kind("0, 1, 2 or 3", lambda value: _is_integer(value) and 0 <= value <= 3)
NUMBER = Kind("a number of at least 0", lambda value: _is_number(value) and value >= 0)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
FRACTION = Kind("a number of at least 0 and below 1", _is_fraction)
RATIO = Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
BETAS = Kind(
    "a list of two numbers of at least 0 and below 1",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_fraction, value)),
)


@dataclass
class Keys:
    """Configuration that records which of its keys are converted or left out, and the settings that come of them."""

    config: Mapping[str, Any]
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    converted: set[str] = field(default_factory=set)

    def read(self, key: str, kind: Kind) -> Any:
        """Return the value of a dotted key, which then counts as converted; None if it is missing, null or "auto"."""
        *parents, leaf = key.split(".")
        value = self.section(".".join(parents)).get(leaf)
        if value == "auto" and key in AUTO:
            self.left_out[key] = f'"auto" stands for {AUTO[key]}'
            return None
        if value is not None and not kind.accepts(value):
            raise _wrong(key, value, kind)
        if value is not None:
            self.converted.add(key)
        return value

    def section(self, key: str) -> Mapping[str, Any]:
        """Return the object below a dotted key; an empty one if it is missing or null, and the configuration for an empty key."""
        section = self.config
        parents = key.split(".") if key else []
        for depth, parent in enumerate(parents, 1):
            value = section.get(parent)
            if value is not None and not SECTION.accepts(value):
                raise _wrong(".".join(parents[:depth]), value, SECTION)
            section = value or {}
        return section

    def below(self, key: str) -> Iterator[str]:
        """Yield the dotted keys of all values below a key."""
        return _leaves(self.section(key), f"{key}.")

    def leave_out(self, key: str, reason: str) -> None:
        """Give the reason why a key is not converted, if the configuration has the key."""
        *parents, leaf = key.split(".")
        if leaf in self.section(".".join(parents)):
            self.converted.discard(key)
            self.left_out[key] = reason

    def leave_out_rest(self, section: str = "", reason: str = UNKNOWN) -> None:
        """Leave out all keys of a section that are neither converted nor left out; `reason` is for those without a reason of their own."""
        leaves = self.below(section) if section else _leaves(self.config)
        for key in leaves:
            names = [key.rsplit(".", count)[0] for count in range(key.count(".") + 1)]
            if not any(name in self.converted or name in self.left_out for name in names):
                known = next((name for name in names if name in REASONS), None)
                self.left_out[known or key] = REASONS[known] if known else reason


def in_one_line(text: str) -> str:
    """Return a text as it is if it can be printed in a line, and otherwise as JSON."""
    return text if text.isprintable() else json.dumps(text)


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None and value != {}:  # null and an empty section set nothing
            yield f"{prefix}{key}"


def _wrong(key: str, value: Any, kind: Kind) -> SpecError:
    text = json.dumps(value)
    return SpecError(f"{key} is {text if len(text) < 80 else text[:77] + '...'}; set it to {kind.text}")
