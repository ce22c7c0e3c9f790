"""Order in which runs that wait for workers give theirs back, so that they do not block each other, each with a part of what it needs."""

from collections.abc import Iterable
from dataclasses import dataclass

PATIENCE_S = 20.0
"""Seconds without a change after which the run with the least patience gives back its ready workers. The run with the next least waits
twice as long, and so on, so that only one run gives way at a time."""


@dataclass(frozen=True)
class WaitingRun:
    """A run that has fewer workers than it needs to train."""

    id: str
    """Id of the run's controller."""
    name: str
    """Name of the run, for messages."""
    needed: int
    """Minimum number of workers with which the run trains."""
    ready: int
    """Number of its workers that are ready."""
    since: float
    """Start of the wait, in seconds since the epoch."""
    has_trained: bool
    """Whether it has steps to lose."""
    resources: tuple[str, ...]
    """Names of the Ray resources of a worker."""


def rivals(own: WaitingRun, others: Iterable[WaitingRun]) -> list[WaitingRun]:
    """Return the other runs whose workers could take the resources of this run's, or the other way round."""
    return [other for other in others if {*other.resources} & {*own.resources}]


def patience_s(own: WaitingRun, others: Iterable[WaitingRun]) -> float:
    """Return the seconds for which a run keeps workers that it cannot use yet, while other runs wait as well.

    The most patient run is one that has trained, then the one that lacks the fewest workers, then the one that has waited longest. It gives
    way in the end, too, because the cluster may have enough workers for another run, but not for this one.
    """
    rank = sorted([own, *others], key=lambda run: (not run.has_trained, run.needed - run.ready, run.since, run.id))
    return PATIENCE_S * (len(rank) - rank.index(own))
