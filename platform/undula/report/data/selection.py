"""Selection and order of runs in a list, by their figures and by the settings of their jobs. Pure."""

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from undula.errors import SpecError

Values: TypeAlias = Mapping[str, Any]
"""Figures and settings of a run, by dotted key."""
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"\s*([^<>=!\s]+)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*", re.DOTALL)


@dataclass(frozen=True)
class Condition:
    """Comparison of a run's value with a given one."""

    key: str
    sign: str
    value: Any
    text: str = ""
    """The value as the user typed it. Texts are compared with this one, because YAML reads 007 as 7 and `on` as true."""

    def holds(self, values: Values) -> bool:
        """Return whether a run satisfies the condition. A run without the value satisfies only `!=`."""
        if self.key not in values:
            return self.sign == "!="
        own, given = values[self.key], self.value
        if isinstance(own, str) and own == self.text:
            given = own
        if self.sign in ("=", "!="):
            return _OPERATORS[self.sign](_comparable(own), _comparable(given))
        if _is_number(own) and _is_number(given):
            return _OPERATORS[self.sign](own, given)
        return isinstance(own, str) and _OPERATORS[self.sign](own, str(given))


@dataclass(frozen=True)
class Selection:
    """Runs to list, and their order."""

    conditions: tuple[Condition, ...] = ()
    """Conditions that a run must satisfy."""
    sort: str | None = None
    """Key by which runs are sorted; None for the newest first."""
    is_descending: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that the selection uses, each once."""
        return tuple(
            dict.fromkeys([*(condition.key for condition in self.conditions), *([self.sort] if self.sort else [])])
        )

    def has(self, values: Values) -> bool:
        """Return whether a run with these values satisfies all conditions."""
        return all(condition.holds(values) for condition in self.conditions)

    def of(self, runs: Mapping[str, Values]) -> list[str]:
        """Return the names of the selected runs in order. Runs without the value by which they are sorted come last.

        Args:
            runs: Values of each run by its name, in the order in which they are listed otherwise.

        Raises:
            SpecError: No run has a key of the selection.
        """
        known = {key for values in runs.values() for key in values}
        if runs and (missing := next((key for key in self.keys if key not in known), None)):
            near = _near(missing, known)
            raise SpecError(
                f"no run has {missing!r}; name a key of `undula ls --json`{near}, or a setting such as schedule.base_lr"
            )
        chosen = [name for name, values in runs.items() if self.has(values)]
        if self.sort is None:
            return chosen
        key = self.sort
        has_value = [name for name in chosen if _rank(runs[name].get(key)) is not None]
        has_value.sort(key=lambda name: _rank(runs[name][key]) or (0, 0.0, ""), reverse=self.is_descending)
        return [*has_value, *(name for name in chosen if name not in has_value)]


def selection(where: Sequence[str], sort: str | None) -> Selection:
    """Return the selection that a user has typed.

    Args:
        where: Conditions such as `steps>=100` or `schedule.base_lr=0.1`.
        sort: Key, with a minus sign before it for descending order; None for the newest runs first.

    Raises:
        SpecError: A condition cannot be read.
    """
    conditions = []
    for text in where:
        match = _CONDITION.fullmatch(text)
        if not match:
            raise SpecError(f"--where {text!r} is no condition; write KEY=VALUE, or one of != < <= > >= in place of =")
        sign = "=" if match[2] == "==" else match[2]
        conditions.append(Condition(match[1], sign, _parsed(match[3]), match[3]))
    if not sort:
        return Selection(tuple(conditions))
    return Selection(tuple(conditions), sort.removeprefix("-"), sort.startswith("-"))


def _parsed(text: str) -> Any:
    """Return a value as in YAML, but also 1e-3 as a number."""
    try:
        return float(text) if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text) else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text


def _comparable(value: Any) -> Any:
    """Return a value that equals another one if both mean the same: 1 equals 1.0, but true does not."""
    return (type(value), value) if isinstance(value, bool) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rank(value: Any) -> tuple[int, float, str] | None:
    """Return the place of a value in order, numbers before texts; None for a value that has none."""
    if isinstance(value, bool):
        return 0, value, ""
    if _is_number(value):
        return (0, value, "") if math.isfinite(value) else None
    return (1, 0.0, value) if isinstance(value, str) else None


def _near(missing: str, known: Iterable[str]) -> str:
    """Return known keys that contain or resemble the missing one, as part of a sentence."""
    similar = [key for key in sorted(known) if missing in key] or difflib.get_close_matches(missing, sorted(known), 3)
    return f" ({', '.join(similar[:3])})" if similar else ""
