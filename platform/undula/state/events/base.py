"""What all events of a run have in common, and the form of a row of a ledger that another version has written."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event(ABC):
    """Something that happened to a run."""

    KIND: ClassVar[str]
    """Name of the class's kind in the ledger."""
    step: int | None = field(default=None, kw_only=True)
    """Number of committed steps when it happened; None where that is not known."""
    time: float = field(default_factory=time.time, kw_only=True)
    """Time at which it happened, in seconds since the epoch."""

    @property
    def kind(self) -> str:
        return self.KIND

    @property
    @abstractmethod
    def message(self) -> str:
        """The event in one or two sentences for a person."""

    @property
    def data(self) -> dict[str, Any]:
        """The fields of the event's own class, ready for JSON."""
        return {name: value for name, value in asdict(self).items() if name not in ("step", "time")}

    def row(self) -> dict[str, Any]:
        """The event as a row of the ledger's EVENT_SCHEMA."""
        data = json.dumps(self.data)
        return {"kind": self.kind, "message": self.message, "step": self.step, "data": data, "time": self.time}


@dataclass(frozen=True)
class RecordedEvent(Event):
    """A row of a ledger whose kind or fields this version does not know, as it was written."""

    KIND = "recorded"
    recorded_kind: str
    recorded_message: str = ""
    recorded_data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.recorded_kind

    @property
    def message(self) -> str:
        return self.recorded_message

    @property
    def data(self) -> dict[str, Any]:
        return dict(self.recorded_data)


def counted(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def short(node: str) -> str:
    """The first eight digits of a node's id, which tell the nodes of a cluster apart."""
    return node[:8]
