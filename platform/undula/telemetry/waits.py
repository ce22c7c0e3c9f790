"""Events that all processes of a run meet at the same time: one in the ledger for each outage, lost cache and failed rehearsal."""

import threading
import time
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from undula.errors import StorageError
from undula.state.events import CacheEvent, RehearsalEvent, StorageEvent
from undula.state.ledger import RowWriter
from undula.state.ledger_files import EVENTS
from undula.storage import LostCache, Outages, Store, Wait
from undula.telemetry.messages import Publisher

CommonEvent: TypeAlias = StorageEvent | CacheEvent | RehearsalEvent
"""Event that several processes report."""
RETRY_INTERVAL_S = 5.0
"""Seconds between two attempts to write an event, whose store may be the one that cannot be reached."""


@dataclass(frozen=True)
class WaitPublisher:
    """Callback for `undula.storage.waits_reported_to` that sends outages and lost caches to the hub. It can be sent to other processes."""

    publish: Publisher

    def __call__(self, news: Wait | LostCache) -> None:
        match news:
            case Wait(place, problem, limit_s):
                self.publish(StorageEvent(place, problem, limit_s))
            case LostCache(folder, host, problem):
                self.publish(CacheEvent(folder, host, problem))
            case _:
                assert_never(news)


class CommonRecorder:
    """Writer of events that several processes report to the ledger of a run. It does not wait for the store.

    Args:
        store: Run directory.
    """

    def __init__(self, store: Store):
        self._rows = RowWriter(store, EVENTS, "storage")
        self._outages = Outages()
        self._known: set[str] = set()

    def record(self, event: CommonEvent) -> bool:
        """Write an event, unless another process has reported the same. Returns whether the event is new."""
        if not self._is_new(event):
            return False
        self._rows.append(event.row())
        threading.Thread(target=self._write, name="undula-outages", daemon=True).start()
        return True

    def _is_new(self, event: CommonEvent) -> bool:
        if isinstance(event, StorageEvent):
            return self._outages.begins(event.place, event.time)
        what = event.folder if isinstance(event, CacheEvent) else event.kind
        is_new = what not in self._known
        self._known.add(what)
        return is_new

    def _write(self) -> None:
        while True:
            try:
                return self._rows.flush()
            except StorageError:
                time.sleep(RETRY_INTERVAL_S)
