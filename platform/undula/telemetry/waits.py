"""Outages of a store in the ledger: one event for each, although all processes of a run meet it at the same time."""

import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

from undula.errors import StorageError
from undula.state.events import StorageEvent
from undula.state.ledger import RowWriter
from undula.state.ledger_files import EVENTS
from undula.storage import Outages, Store, Wait
from undula.telemetry.messages import Publisher

RETRY_INTERVAL_S = 5.0
"""Seconds between two attempts to write an event, whose store may be the one that cannot be reached."""


@dataclass(frozen=True)
class WaitPublisher:
    """Callback for `undula.storage.waits_reported_to` that sends outages to the hub. It can be sent to other processes."""

    publish: Publisher

    def __call__(self, wait: Wait) -> None:
        self.publish(StorageEvent(wait.place, wait.problem, wait.limit_s))


class OutageRecorder:
    """Writer of outages to the ledger of a run. A thread writes them, so that `record` does not wait for the store.

    Args:
        store: Run directory.
    """

    def __init__(self, store: Store):
        self._rows = RowWriter(store, EVENTS, "storage")
        self._outages = Outages()
        self._queue: SimpleQueue[StorageEvent] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def record(self, event: StorageEvent) -> bool:
        """Write the event of an outage, unless the outage has one already. Returns whether the event is new."""
        if not self._outages.begins(event.place, event.time):
            return False
        self._queue.put(event)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="undula-outages", daemon=True)
            self._thread.start()
        return True

    def _write(self) -> None:
        while True:
            self._rows.append(self._queue.get().row())
            while True:
                try:
                    self._rows.flush()
                    break
                except StorageError:
                    time.sleep(RETRY_INTERVAL_S)
