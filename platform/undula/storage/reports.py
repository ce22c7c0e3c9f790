"""What a process reports about its stores: outages for which requests wait, and caches that take no more data."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

QUIET_S = 60.0
"""Time in seconds without a failure after which the next one belongs to another outage."""


@dataclass(frozen=True)
class Wait:
    """Outage of a store for which requests wait."""

    place: str
    """URL of the bucket."""
    problem: str
    """Failure of the last request, in one line."""
    limit_s: float
    """Time in seconds after which a request that fails is given up."""


@dataclass(frozen=True)
class LostCache:
    """Cache of a store's data on a disk that takes no more data."""

    folder: str
    host: str
    problem: str
    """Failure of the last write, in one line."""


Reporter: TypeAlias = Callable[[Wait | LostCache], None]


@dataclass
class Outages:
    """Knows which failures belong to the same outage: those of one place, with less than QUIET_S between one and the next."""

    _last: dict[str, float] = field(default_factory=dict)

    def begins(self, place: str, now: float) -> bool:
        """Record a failure, and return whether an outage begins with it."""
        last = self._last.get(place)
        self._last[place] = now
        return last is None or now - last > QUIET_S


_lock = threading.Lock()
_reporter: Reporter | None = None
_outages = Outages()


def report_failure(wait: Wait) -> None:
    """Report a request that has failed for a while, unless its outage has been reported."""
    if reporter := _reporter:
        with _lock:
            is_new = _outages.begins(wait.place, time.monotonic())
        if is_new:
            reporter(wait)


def report_lost_cache(lost: LostCache) -> None:
    """Report that a cache takes no more data from this process."""
    if reporter := _reporter:
        reporter(lost)


def waits_reporter() -> Reporter | None:
    """Return the callback for reports of this process. It can be sent to other processes that read for this one."""
    return _reporter


@contextmanager
def waits_reported_to(reporter: Reporter | None) -> Iterator[None]:
    """Report the outages for which requests of any thread wait during this block, and the caches that are lost, each once.

    Args:
        reporter: Callback, which must neither wait nor fail; None for no reports.
    """
    global _reporter, _outages
    former, _reporter, _outages = _reporter, reporter, Outages()
    try:
        yield
    finally:
        _reporter = former
