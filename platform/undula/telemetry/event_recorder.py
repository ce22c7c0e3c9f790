"""Writer of the events of a process to the ledger, which also shows them."""

from dataclasses import dataclass

from undula.state.events import Event
from undula.state.ledger import EventWriter
from undula.storage import Store
from undula.telemetry.messages import Publisher


@dataclass
class EventRecorder:
    """Writes the controller's events to the ledger, and sends them to the driver's live view."""

    store: Store
    publish: Publisher
    _writer: EventWriter | None = None
    """Writer of this process, created with its first event."""

    def __reduce__(self) -> tuple[type["EventRecorder"], tuple[Store, Publisher]]:
        return EventRecorder, (self.store, self.publish)

    def __call__(self, event: Event) -> None:
        self._writer = self._writer or EventWriter(self.store, "controller")
        self._writer.event(event)
        self.publish(event)
