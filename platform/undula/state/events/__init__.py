"""Events of a run: one class per kind, with typed fields from which its message is built, and the reading of events from the ledger.

Programs and tests read `kind` and the fields, which are stable; the wording of a message can change with any version.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from undula.masking.values import mask, masked
from undula.state.events.base import Event, RecordedEvent
from undula.state.events.training import (
    BatchEvent,
    CacheEvent,
    CheckpointEvent,
    EndEvent,
    EstimateEvent,
    FailEvent,
    LogEvent,
    LossEvent,
    LostEvent,
    MemoryEvent,
    SkipEvent,
    SnapshotEvent,
    StartEvent,
    StopEvent,
    StorageEvent,
    TrackerEvent,
    ValidationEvent,
    WarningCode,
    WarningEvent,
)
from undula.state.events.workers import (
    CrashCause,
    CrashEvent,
    FaultEvent,
    FleetEvent,
    GiveWayEvent,
    GroupEvent,
    IdleEvent,
    NodeEvent,
    NoticeEvent,
    OverdueEvent,
    RefusalEvent,
    RehearsalEvent,
    ReleaseEvent,
    ResizeEvent,
    SaveEvent,
    StayEvent,
    StayReason,
    WaitedFor,
    WaitingEvent,
    WorkerPlace,
)

__all__ = [
    "EVENT_TYPES",
    "BatchEvent",
    "CacheEvent",
    "CheckpointEvent",
    "CrashCause",
    "CrashEvent",
    "EndEvent",
    "EstimateEvent",
    "Event",
    "FailEvent",
    "FaultEvent",
    "FleetEvent",
    "GiveWayEvent",
    "GroupEvent",
    "IdleEvent",
    "LogEvent",
    "LossEvent",
    "LostEvent",
    "MemoryEvent",
    "NodeEvent",
    "NoticeEvent",
    "OverdueEvent",
    "RecordedEvent",
    "RefusalEvent",
    "RehearsalEvent",
    "ReleaseEvent",
    "ResizeEvent",
    "SaveEvent",
    "SkipEvent",
    "SnapshotEvent",
    "StartEvent",
    "StayEvent",
    "StayReason",
    "StopEvent",
    "StorageEvent",
    "TrackerEvent",
    "ValidationEvent",
    "WaitedFor",
    "WaitingEvent",
    "WarningCode",
    "WarningEvent",
    "WorkerPlace",
    "read_event",
]

EVENT_TYPES = {each.KIND: each for each in Event.__subclasses__() if each is not RecordedEvent}
"""Classes of events, by kind."""


def read_event(row: Mapping[str, Any]) -> Event:
    """Return the event of a row of the ledger's EVENT_SCHEMA: a RecordedEvent if this version does not know its kind or its fields.

    Former versions did not mask secrets.
    """
    value = masked(json.loads(row["data"] or "{}"))
    data = value if isinstance(value, dict) else {}
    event_type = EVENT_TYPES.get(row["kind"])
    if event_type is not None:
        try:
            event: Event = _adapter(event_type).validate_python({**data, "step": row["step"], "time": row["time"]})
            return event
        except ValidationError:
            pass
    return RecordedEvent(row["kind"], mask(row["message"] or ""), data, step=row["step"], time=row["time"])


@cache
def _adapter(event_type: type[Event]) -> TypeAdapter[Any]:
    return TypeAdapter(event_type)
