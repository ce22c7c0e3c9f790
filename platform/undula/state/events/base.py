"""Base class of the events of a run, and the class for events that another version has written."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from undula.masking.values import mask, masked


@dataclass(frozen=True)
class Event(ABC):
    """Something that happened to a run."""

    KIND: ClassVar[str]
    """Kind of the class's events in the ledger."""
    step: int | None = field(default=None, kw_only=True)
    """Number of committed steps when the event happened; None if unknown."""
    time: float = field(default_factory=time.time, kw_only=True)
    """Time of the event in seconds since the epoch."""

    @property
    def kind(self) -> str:
        return self.KIND

    @property
    @abstractmethod
    def message(self) -> str:
        """Description of the event for people, in one or two sentences."""

    @property
    def data(self) -> dict[str, Any]:
        """Fields of the event's own class, in a form that JSON can represent."""
        return {name: value for name, value in asdict(self).items() if name not in ("step", "time")}

    def row(self) -> dict[str, Any]:
        """Return the event as a row of the ledger's EVENT_SCHEMA, without secrets."""
        data, message = json.dumps(masked(self.data)), mask(self.message)
        return {"kind": self.kind, "message": message, "step": self.step, "data": data, "time": self.time}


@dataclass(frozen=True)
class RecordedEvent(Event):
    """Row of a ledger whose kind or fields this version does not know. Its content is kept as it was written."""

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
    """Return a number with its noun, such as `1 worker` or `2 workers`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def figure(value: float) -> str:
    """Return a number with six significant digits, and a whole one, such as a count or an id, with all of its digits."""
    is_whole = isinstance(value, int) or (value.is_integer() and abs(value) < 2**53)
    return str(int(value)) if is_whole else f"{value:.6g}"


def short(node: str) -> str:
    """Return the first eight digits of a node's id, which are enough to distinguish the nodes of a cluster."""
    return node[:8]
