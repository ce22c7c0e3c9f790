"""The runs of a cluster that wait for workers, as their controllers tell each other through the cluster's head."""

import json
import random
import time
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter, ValidationError

from undula.elastic.pure.sharing import PATIENCE_S, WaitingRun, patience_s, rivals
from undula.elastic.ray.capacity import BackgroundCall
from undula.elastic.ray.events import EventSink
from undula.elastic.ray.pool import WorkerPool
from undula.state.events import GiveWayEvent

INTERVAL_S = 2.0
"""Seconds between two exchanges with the head."""
FRESH_S = 15.0
"""Seconds after which an entry that has not changed counts as one of a controller that has ended, and is deleted."""
STARTING_S = 30.0
"""Seconds within which workers that start become ready, unless they wait for resources that other runs hold, too."""
NAMESPACE = b"undula_waiting"


@dataclass
class WaitingRuns:
    """This run's entry at the head, and what it reads from those of other runs. It works in the background, as the head can be slow."""

    others: list[WaitingRun] = field(default_factory=list)
    """Other runs that wait, as of the last exchange."""
    _seen: dict[bytes, tuple[bytes, float]] = field(default_factory=dict)
    """Content of each entry, and the time on the monotonic clock at which it was first seen. The clocks of controllers may differ."""
    _told_at: float = float("-inf")
    _told: bytes | None = None
    _background: BackgroundCall = field(default_factory=BackgroundCall)

    def tell(self, own: WaitingRun) -> None:
        """Tell the other runs that this one waits, and learn of them. This call does not block."""
        now = time.monotonic()
        if now - self._told_at >= INTERVAL_S and self._background(lambda: self._exchange(own, now)):
            self._told_at = now

    def withdraw(self) -> None:
        """Tell the other runs that this one does not wait any more."""
        if self._told_at > float("-inf"):
            self._told_at = float("-inf")
            self._background(self._delete, waits=True)

    def _exchange(self, own: WaitingRun, now: float) -> None:
        key, storage = own.id.encode(), _storage()
        self._told = key
        storage._internal_kv_put(key, json.dumps([asdict(own), now]).encode(), overwrite=True, namespace=NAMESPACE)
        found = {}
        for other in set(storage._internal_kv_list(b"", namespace=NAMESPACE)) - {key}:
            content = storage._internal_kv_get(other, namespace=NAMESPACE) or b""
            before, since = self._seen.get(other, (None, now))
            if content != before:
                found[other] = content, now
            elif now - since < FRESH_S:
                found[other] = content, since
            else:  # a controller that is only slow tells it again
                storage._internal_kv_del(other, namespace=NAMESPACE)
        self._seen = found
        self.others = [run for content, _ in found.values() for run in _parsed(content)]

    def _delete(self) -> None:
        if self._told is not None:
            _storage()._internal_kv_del(self._told, namespace=NAMESPACE)
            self._told, self.others = None, []


@dataclass
class WorkerSharing:
    """Gives the ready workers of a run that waits to other runs that wait, for a while, so that none of them blocks the others."""

    pool: WorkerPool
    on_event: EventSink
    _runs: WaitingRuns = field(default_factory=WaitingRuns)
    _most: tuple[int, int] = (0, 0)
    """Largest number of workers that were ready at one time, and largest number that were either ready or still starting."""
    _grown_at: float = 0.0
    """Time on the monotonic clock at which one of these numbers has grown. That a worker crashes and starts again is no progress."""
    _until: float = 0.0
    """Time on the monotonic clock at which the run starts workers again."""

    def waits(self, own: WaitingRun) -> tuple[str, ...]:
        """Take note that this run waits. Call this repeatedly during a wait.

        Returns:
            Names of other runs that wait for workers as well.
        """
        self._runs.tell(own)
        others, now, pool = rivals(own, self._runs.others), time.monotonic(), self.pool
        names = tuple(sorted(other.name for other in others))
        most = max(own.ready, self._most[0]), max(own.ready + pool.preparing, self._most[1])
        if pool.gives_way:
            pool.gives_way = bool(others) and now < self._until
        elif most != self._most or not others:
            self._most, self._grown_at = most, now
        elif (
            own.ready
            and not pool.must_stay
            and now - self._grown_at > patience_s(own, others) + (STARTING_S if pool.preparing else 0.0)
        ):
            # Random, so that runs do not come back at the same time.
            pause_s = random.uniform(PATIENCE_S, 2 * PATIENCE_S)
            pool.gives_way, self._until, self._most = True, now + pause_s, (0, 0)
            self.on_event(GiveWayEvent(own.ready, names, pause_s))
        return names

    def ends(self) -> None:
        """Take note that this run does not wait."""
        self.pool.gives_way, self._most = False, (0, 0)
        self._runs.withdraw()


def _parsed(content: bytes) -> list[WaitingRun]:
    """Return the run of an entry; none if it is of another version."""
    try:
        return [TypeAdapter(tuple[WaitingRun, float]).validate_json(content)[0]]
    except ValidationError:
        return []


def _storage() -> Any:
    return import_module("ray.experimental.internal_kv")
