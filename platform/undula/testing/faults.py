"""Faults as a schedule that reads as sentences: `at step 40: sigkill worker 1`, `at 30 s: drain node 2 deadline 20`. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from undula.errors import SpecError

Action = Literal["sigkill", "sigstop", "kill", "drain", "add"]
_SENTENCE = re.compile(
    r"at (?:step (?P<step>\d+)|(?P<seconds>\d+(?:\.\d+)?) s): "
    r"(?:(?P<signal>sigkill|sigstop) worker (?P<rank>\d+)"
    r"|(?P<kill>kill) node (?P<killed>\d+)"
    r"|(?P<drain>drain) node (?P<drained>\d+) deadline (?P<deadline>\d+(?:\.\d+)?)"
    r"|(?P<add>add) node)"
)
FORMS = (
    "at step N: or at N s:, then sigkill worker R, sigstop worker R, kill node N, drain node N deadline S, or add node"
)


@dataclass(frozen=True)
class Fault:
    """Something that happens to a cluster."""

    action: Action
    at_step: int | None = None
    """Steps committed by then."""
    at_s: float | None = None
    """Seconds after the job's first step."""
    target: int = 0
    """A rank for a signal; the place of a node, in the order in which nodes were added, for kill and drain."""
    deadline_s: float = 0.0
    """After a drain the node is killed so many seconds later."""

    def is_due(self, step: int, seconds: float) -> bool:
        return step >= self.at_step if self.at_step is not None else seconds >= (self.at_s or 0.0)

    def __str__(self) -> str:
        when = f"step {self.at_step}" if self.at_step is not None else f"{self.at_s:g} s"
        if self.action == "add":
            return f"at {when}: add node"
        if self.action == "drain":
            return f"at {when}: drain node {self.target} deadline {self.deadline_s:g}"
        return f"at {when}: {self.action} {'node' if self.action == 'kill' else 'worker'} {self.target}"


def parse_faults(text: str, source: str = "schedule") -> tuple[Fault, ...]:
    """A schedule: one fault a line, blank lines and `#` comments aside.

    Raises:
        SpecError: a line is no fault.
    """
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        sentence = " ".join(line.partition("#")[0].split())
        if not sentence:
            continue
        match = _SENTENCE.fullmatch(sentence)
        if match is None:
            raise SpecError(f"{source}:{number}: {sentence!r} is no fault: write {FORMS}")
        action = match["signal"] or match["kill"] or match["drain"] or match["add"]
        faults.append(
            Fault(
                action,  # type: ignore[arg-type]
                int(match["step"]) if match["step"] else None,
                float(match["seconds"]) if match["seconds"] else None,
                int(match["rank"] or match["killed"] or match["drained"] or 0),
                float(match["deadline"] or 0.0),
            )
        )
    return tuple(faults)


@dataclass(frozen=True)
class Trace:
    """A recorded count of spot instances."""

    counts: tuple[int, ...]
    gap_s: float
    """Seconds between counts."""

    def changes(self, speedup: float, most: int) -> tuple[tuple[float, int], ...]:
        """(seconds, nodes) for each time at which the count, cut at `most`, becomes another; the first at 0."""
        capped = [min(count, most) for count in self.counts]
        ticks = [0, *(tick + 1 for tick, (before, after) in enumerate(pairwise(capped)) if before != after)]
        return tuple((tick * self.gap_s / speedup, capped[tick]) for tick in ticks)

    def window(self, changes: int, most: int) -> "Trace":
        """The stretch with so many changes in which the count is at 0 for the fewest ticks."""
        capped = [min(count, most) for count in self.counts]
        at = [tick + 1 for tick, (before, after) in enumerate(pairwise(capped)) if before != after]
        if len(at) < changes:
            return self
        stretches = [(at[first] - 1, at[first + changes - 1] + 1) for first in range(len(at) - changes + 1)]
        start, stop = min(
            stretches, key=lambda stretch: capped[stretch[0] : stretch[1]].count(0) / (stretch[1] - stretch[0])
        )
        return Trace(self.counts[start:stop], self.gap_s)


def parse_trace(tree: object, source: str) -> Trace:
    """A trace of `{"metadata": {"gap_seconds": 300}, "data": [4, 4, 3, ...]}`.

    Raises:
        SpecError: it is none.
    """
    try:
        counts = tuple(int(count) for count in tree["data"])  # type: ignore[index]
        gap_s = float(tree["metadata"]["gap_seconds"])  # type: ignore[index]
    except (TypeError, KeyError, ValueError) as error:
        raise SpecError(
            f'{source} is no trace ({error!r}): it should be {{"metadata": {{"gap_seconds": 300}}, "data": [4, 4, 3]}}'
        ) from None
    if not counts or min(counts) < 0 or gap_s <= 0:
        raise SpecError(f"{source} is no trace: data must hold counts from 0 up, and gap_seconds be above 0")
    return Trace(counts, gap_s)


def oracle_rank_s(changes: Sequence[tuple[float, int]], end_s: float, low: int) -> float:
    """Rank-seconds that a job would train in `end_s` seconds, if it took no time to resize: all nodes, where at least `low` are there."""
    ends = [seconds for seconds, _ in changes[1:]] + [end_s]
    return sum(
        count * max(min(end, end_s) - begin, 0.0)
        for (begin, count), end in zip(changes, ends, strict=True)
        if count >= low
    )
