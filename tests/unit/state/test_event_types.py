"""Tests of events: the ledger preserves their types and fields, and each has a message for people."""

import json
import subprocess
import sys
from typing import get_args

import pytest

from undula.state import events
from undula.state.events import EVENT_TYPES, Event, RecordedEvent, read_event

PLACE: events.WorkerPlace = {
    "rank": 0,
    "node": "4f1c2d3e5a",
    "ip": "10.0.0.1",
    "pid": 12,
    "machine": "g6.xlarge",
    "zone": "us-west-2a",
}
EVENTS: tuple[Event, ...] = (
    events.GroupEvent((PLACE,), "job"),
    events.StartEvent(2, 1, step=0),
    events.StartEvent(1, 2, "the memory of a worker", step=38),
    events.LostEvent(1, step=4),
    events.NodeEvent("4f1c2d3e5a", 2),
    events.NodeEvent("4f1c2d3e5a", 1, 6.5),
    *(events.StayEvent(1, 2, reason, 25.0, {"CPU": 1.0}) for reason in get_args(events.StayReason)),
    events.BatchEvent(16, "linear", 2.0, 2.0, 32.0, 2, step=10),
    events.BatchEvent(16, "linear", 2.0, 2.0, step=0),
    events.BatchEvent(16, "adascale", 2.0, None, step=0),
    events.SkipEvent(65536.0, 32768.0, step=3),
    events.SkipEvent(1024.0, 1024.0, step=3),
    events.ValidationEvent(1.25, 9, step=20),
    events.ValidationEvent(1.25, 9, {"accuracy": 0.5}, step=20),
    events.LossEvent(1.5, 90, step=20),
    events.LogEvent({"accuracy": 0.5, "epoch": 2.0}, step=20),
    events.SnapshotEvent(2**20, 3, 0.008, step=8),
    events.CheckpointEvent(0.5, step=20),
    events.ResizeEvent(2, 1, "1 of 2 workers runs on a node that will go"),
    events.ResizeEvent(2, 2, "1 worker moves from node a, which will be removed, to node b"),
    events.SaveEvent("only 1 worker stays"),
    events.SaveEvent("only 1 worker stays", lead_s=5.0),
    *(events.CrashEvent(cause, "KeyError: 'x'", 1, "4f1c2d3e5a", 12, 5.0) for cause in get_args(events.CrashCause)),
    events.NoticeEvent("4f1c2d3e5a", (0, 1), 160.0, time=100.0),
    events.NoticeEvent("4f1c2d3e5a", (0,)),
    *(events.WaitingEvent(1, 1, 2, each, {"CPU": 1.0}, (PLACE,), "job") for each in get_args(events.WaitedFor)),
    events.WaitingEvent(1, 0, 3, rivals=("digits", "letters")),
    events.GiveWayEvent(1, ("digits",), 31.5),
    events.FleetEvent(2, 1, 300.0, 600.0),
    events.FleetEvent(0, 0, None, 600.0),
    events.FleetEvent(1, 0),
    events.OverdueEvent(30.0),
    events.ReleaseEvent("4f1c2d3e5a", 2, 0),
    events.RefusalEvent("spot-1", "InsufficientInstanceCapacity"),
    events.RefusalEvent("spot-1"),
    events.IdleEvent("4f1c2d3e5a", 1, 60.0, 4),
    events.RehearsalEvent("KeyError: 'x'"),
    events.EstimateEvent("L4", 1e9, 2e9, 3e9, {"1": 0.5}),
    events.MemoryEvent(2**30),
    events.MemoryEvent(2**30, 2**31, 2**32),
    events.FaultEvent("sigkill worker 0", step=9),
    events.StorageEvent("s3://bucket", "503 SlowDown (GetObject)", 120.0),
    events.CacheEvent("/mnt/cache", "ip-10-0-0-1", "No space left on device"),
    events.TrackerEvent("MLflow", 120, "ConnectionError: connection refused"),
    events.TrackerEvent("MLflow", None, "ConnectionError: connection refused"),
    events.TrackerEvent("MLflow", 480),
    events.StopEvent(),
    events.FailEvent("rank 0: KeyError: 'x' at job.py:7"),
    events.EndEvent(step=400),
    events.EndEvent("loss has not improved", step=40),
    events.EndEvent(),
    *(events.WarningEvent(code, "the disk is full.", step=4) for code in get_args(events.WarningCode)),
)  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_an_event_is_read_from_the_ledger_unchanged(event: Event) -> None:
    assert read_event(event.row()) == event


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_a_message_is_a_sentence(event: Event) -> None:
    assert event.message[0].isupper()
    assert event.message.endswith(".")
    assert not event.message.endswith("..")
    assert "None" not in event.message
    assert "?" not in event.message


def test_each_type_has_its_own_kind_and_is_tested_here() -> None:
    assert {type(event) for event in EVENTS} == set(EVENT_TYPES.values())


def test_the_time_left_in_a_notice_counts_from_the_event() -> None:
    assert "60 s" in events.NoticeEvent("n", (0,), 160.0, time=100.0).message


@pytest.mark.parametrize(
    ("kind", "data"),
    [("fortune", {"luck": 7}), ("crash", {"error": "a field that this version needs is missing"}), ("validation", {"loss": "low"})],
)  # fmt: skip
def test_a_row_of_another_version_stays_readable(kind: str, data: dict[str, object]) -> None:
    row = {"kind": kind, "message": "something happened", "step": 3, "data": json.dumps(data), "time": 5.0}
    event = read_event(row)
    assert isinstance(event, RecordedEvent)
    assert (event.kind, event.message, event.step, event.data, event.time) == (kind, "something happened", 3, data, 5.0)
    assert event.row() == row


@pytest.mark.parametrize(
    ("kind", "data", "event"),
    [
        ("start", {"world_size": 2, "attempt": 1, "resumed": False}, events.StartEvent(2, 1, step=3, time=5.0)),
        ("validation", {"loss": 2, "samples": 9}, events.ValidationEvent(2.0, 9, step=3, time=5.0)),
        ("waiting", {"ready": 1}, events.WaitingEvent(1, step=3, time=5.0)),
        ("group", {"workers": [{"rank": 0}], "job": "a"}, events.GroupEvent(({"rank": 0},), "a", step=3, time=5.0)),
    ],
)
def test_rows_of_older_versions_have_the_fields_that_reports_need(
    kind: str, data: dict[str, object], event: Event
) -> None:
    assert read_event({"kind": kind, "message": "", "step": 3, "data": json.dumps(data), "time": 5.0}) == event


def test_events_load_neither_torch_nor_pyarrow_nor_ray() -> None:
    look = (
        "import sys, undula.state.events; print([name for name in ('torch', 'pyarrow', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
