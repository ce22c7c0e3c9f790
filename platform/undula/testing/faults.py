"""Schedules of faults, such as `at step 40: sigkill worker 1` or `at 30 s: drain node 2 deadline 20`, and traces of nodes. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from undula.errors import SpecError

_TIME = r"at (?:step (?P<step>\d+)|(?P<seconds>\d+(?:\.\d+)?) s): "
_PLACES = {"R": r"(?P<target>\d+)", "N": r"(?P<target>\d+)", "S": r"(?P<deadline>\d+(?:\.\d+)?)"}
"""Regular expressions of the letters in the form of an action."""


class Action(Enum):
    """Action of a fault. The value is its form in a schedule, in which R is a rank, N the index of a node, and S a number of seconds."""

    SIGKILL = "sigkill worker R"
    SIGSTOP = "sigstop worker R"
    KILL = "kill node N"
    DRAIN = "drain node N deadline S"
    ADD = "add node"

    @property
    def needs_node(self) -> bool:
        """Whether the target of the action is a node."""
        return "N" in self.value.split()

    def sentence(self, target: int | str = "", deadline_s: float = 0.0) -> str:
        """Return the form of the action with a target and a deadline."""
        values = {"R": str(target), "N": str(target), "S": f"{deadline_s:g}"}
        return " ".join(values.get(word, word) for word in self.value.split())

    @property
    def pattern(self) -> str:
        """Regular expression of the action in a schedule."""
        return " ".join(_PLACES.get(word, word) for word in self.value.split())


FORMS = f"`at step N: ` or `at N s: `, followed by one of {', '.join(f'`{action.value}`' for action in Action)}"
"""Forms of a fault in a schedule, for messages."""


@dataclass(frozen=True)
class Fault:
    """Fault to inject into a cluster at a step or a time."""

    action: Action
    at_step: int | None = None
    """Number of committed steps at which the fault is due."""
    at_s: float | None = None
    """Seconds after the job's first step at which the fault is due."""
    target: int = 0
    """Rank of a worker, or index of a node in the order in which nodes were added."""
    deadline_s: float = 0.0
    """Seconds after a drain at which the node is killed."""

    def is_due(self, step: int, seconds: float) -> bool:
        """Return whether the fault is due after `step` committed steps and `seconds` seconds since the first step."""
        return step >= self.at_step if self.at_step is not None else seconds >= (self.at_s or 0.0)

    def __str__(self) -> str:
        when = f"step {self.at_step}" if self.at_step is not None else f"{self.at_s:g} s"
        return f"at {when}: {self.action.sentence(self.target, self.deadline_s)}"


def parse_faults(text: str, source: str = "schedule") -> tuple[Fault, ...]:
    """Parse a schedule with one fault per line. Blank lines and comments after `#` are ignored.

    Raises:
        SpecError: A line is not a fault.
    """
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        sentence = " ".join(line.partition("#")[0].split())
        if not sentence:
            continue
        if (fault := _parsed(sentence)) is None:
            raise SpecError(f"{source}:{number}: {sentence!r} is not a fault; write {FORMS}")
        faults.append(fault)
    return tuple(faults)


def _parsed(sentence: str) -> Fault | None:
    """Return the fault of a line; None if the line is not a fault."""
    for action in Action:
        if match := re.fullmatch(_TIME + action.pattern, sentence):
            given = match.groupdict()
            return Fault(
                action,
                int(given["step"]) if given["step"] else None,
                float(given["seconds"]) if given["seconds"] else None,
                int(given.get("target") or 0),
                float(given.get("deadline") or 0.0),
            )
    return None


@dataclass(frozen=True)
class Trace:
    """Recorded number of spot instances over time."""

    counts: tuple[int, ...]
    gap_s: float
    """Seconds between two counts."""

    def changes(self, speedup: float, most: int) -> tuple[tuple[float, int], ...]:
        """Return (seconds, nodes) for each change of the count, limited to `most` nodes. The first entry is at 0 seconds."""
        capped = [min(count, most) for count in self.counts]
        ticks = [0, *(tick + 1 for tick, (before, after) in enumerate(pairwise(capped)) if before != after)]
        return tuple((tick * self.gap_s / speedup, capped[tick]) for tick in ticks)

    def window(self, changes: int, most: int) -> "Trace":
        """Return the part of the trace with the given number of changes in which the count is 0 for the smallest share of the time.

        A trace with fewer changes is returned whole.
        """
        capped = [min(count, most) for count in self.counts]
        at = [tick + 1 for tick, (before, after) in enumerate(pairwise(capped)) if before != after]
        if len(at) < changes:
            return self
        windows = [(at[first] - 1, at[first + changes - 1] + 1) for first in range(len(at) - changes + 1)]
        start, stop = min(windows, key=lambda window: capped[window[0] : window[1]].count(0) / (window[1] - window[0]))
        return Trace(self.counts[start:stop], self.gap_s)


def parse_trace(tree: object, source: str) -> Trace:
    """Parse a trace of the form `{"metadata": {"gap_seconds": 300}, "data": [4, 4, 3, ...]}`.

    Raises:
        SpecError: The tree does not have this form.
    """
    try:
        counts = tuple(int(count) for count in tree["data"])  # type: ignore[index]
        gap_s = float(tree["metadata"]["gap_seconds"])  # type: ignore[index]
    except (TypeError, KeyError, ValueError) as error:
        raise SpecError(
            f'{source} is not a trace ({error!r}); write {{"metadata": {{"gap_seconds": 300}}, "data": [4, 4, 3]}}'
        ) from None
    if not counts or min(counts) < 0 or gap_s <= 0:
        raise SpecError(f"{source} is not a trace; data needs counts of at least 0, and gap_seconds must be positive")
    return Trace(counts, gap_s)


def oracle_rank_s(changes: Sequence[tuple[float, int]], end_s: float, low: int) -> float:
    """Return the rank-seconds that an ideal job would train in `end_s` seconds.

    An ideal job resizes in no time and uses all nodes whenever there are at least `low`.
    """
    ends = [seconds for seconds, _ in changes[1:]] + [end_s]
    return sum(
        count * max(min(end, end_s) - begin, 0.0)
        for (begin, count), end in zip(changes, ends, strict=True)
        if count >= low
    )
