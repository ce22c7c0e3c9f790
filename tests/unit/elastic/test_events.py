"""Tests that events reach their sink in order, without blocking the caller."""

import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.train.v2._internal.execution.controller.state import PreemptingState, RestartingState, RunningState
from ray.train.v2.api.exceptions import ControllerError
from ray.train.v2.api.preemption import PreemptionInfo

from undula.elastic.ray.events import ControllerEvents, EventQueue
from undula.errors import StorageError
from undula.state.events import CrashEvent, Event, FaultEvent, GroupEvent, NoticeEvent, WaitingEvent, WorkerPlace
from undula.state.ledger import decode_events, read_ledger
from undula.storage import Store
from undula.telemetry.event_recorder import EventRecorder


def test_a_slow_sink_blocks_no_caller_and_gets_all_events_in_order() -> None:
    received: list[Event] = []
    may_go_on = threading.Event()

    def slow(event: Event) -> None:
        assert may_go_on.wait(10)
        received.append(event)

    queue = EventQueue(slow)
    events = [FaultEvent(str(number)) for number in range(5)]
    for event in events:
        queue(event)
    assert received == []
    may_go_on.set()
    queue.close()
    assert received == events


def test_events_that_could_not_be_stored_are_written_with_the_next_event(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    tell: EventRecorder = pickle.loads(pickle.dumps(EventRecorder(store, print)))  # type: ignore[arg-type]
    events = tuple(FaultEvent(name, time=time) for time, name in enumerate(("first", "second", "third")))
    tell(events[0])
    (folder,) = tmp_path.glob("run/ledger")
    folder.rename(tmp_path / "away")
    folder.touch()  # a file replaces the folder
    tell(events[1])
    folder.unlink()
    (tmp_path / "away").rename(folder)
    tell(events[2])
    assert decode_events(read_ledger(store).events) == events


SPOT = {"undula.io/machine": "g6.xlarge", "undula.io/market": "spot", "ray.io/market-type": "on-demand",
        "ray.io/availability-region": "us-west-2", "ray.io/availability-zone": "us-west-2a"}  # fmt: skip


def node_table() -> list[dict[str, Any]]:
    """Return nodes like ray.nodes(): one with all labels, one with Ray's labels only, and one without labels and resources."""
    labels = {"spot": SPOT, "rays": {"ray.io/market-type": "on-demand", "ray.io/node-id": "rays"}, "bare": {}}
    resources = {"spot": {"CPU": 96.0, "GPU": 8.0, "memory": 1e12}, "rays": {"CPU": 8.0}, "bare": {}}
    return [
        {"NodeID": node, "Alive": True, "Labels": own, "Resources": resources[node]} for node, own in labels.items()
    ]


NEEDS = {"CPU": 2.0, "GPU": 1.0}


def worker(node: str, pid: int) -> Any:
    return SimpleNamespace(node=node, metadata=SimpleNamespace(node_id=node, node_ip="10.0.0.1", pid=pid))


def test_a_group_event_has_the_machines_of_its_ranks_from_the_node_labels() -> None:
    received: list[Event] = []
    members = [worker("spot", 1), worker("rays", 2), worker("bare", 3), worker("gone", 4)]
    ControllerEvents(received.append, NEEDS, node_table).after_worker_group_training_start(
        SimpleNamespace(get_workers=lambda: members)  # type: ignore[arg-type]
    )
    ip: WorkerPlace = {"ip": "10.0.0.1"}
    labels: WorkerPlace = {"machine": "g6.xlarge", "market": "spot", "region": "us-west-2", "zone": "us-west-2a"}
    (group,) = received
    assert isinstance(group, GroupEvent)
    assert group.workers == (
        {"rank": 0, "node": "spot", "pid": 1, **ip, **labels, "share": 1 / 8},
        {"rank": 1, "node": "rays", "pid": 2, **ip, "market": "on-demand", "share": 2 / 8},
        {"rank": 2, "node": "bare", "pid": 3, **ip},
        {"rank": 3, "node": "gone", "pid": 4, **ip},
    )


def test_a_waiting_event_has_the_machines_of_the_ready_workers() -> None:
    received: list[Event] = []
    events = ControllerEvents(received.append, NEEDS, node_table)
    tell = events.with_ready_workers(lambda: [worker("spot", 1), worker("bare", 2)])
    lost = CrashEvent("hang", rank=1)
    tell(WaitingEvent(2))
    tell(lost)
    events.after_worker_group_training_start(SimpleNamespace(get_workers=list))  # type: ignore[arg-type]
    tell(WaitingEvent(2))
    waiting, crash, _, later = received
    assert isinstance(waiting, WaitingEvent)
    assert isinstance(later, WaitingEvent)
    assert waiting.job == later.job
    assert waiting.job != ControllerEvents(received.append, NEEDS, node_table)._job
    assert waiting.ready == 2
    assert [(place.get("machine"), place.get("share")) for place in waiting.workers] == [
        ("g6.xlarge", 1 / 8),
        (None, None),
    ]
    assert [(place["node"], place["pid"]) for place in waiting.workers] == [("spot", 1), ("bare", 2)]
    assert crash == lost


def test_a_preemption_becomes_a_notice_for_each_node() -> None:
    received: list[Event] = []
    state = PreemptingState(PreemptionInfo(5_000, {"a": [0, 1], "b": [2]}), detected_at_s=1.0)
    ControllerEvents(received.append, NEEDS, node_table).after_controller_state_update(RunningState(), state)
    notices = [event for event in received if isinstance(event, NoticeEvent)]
    assert [(event.node, event.ranks, event.deadline) for event in notices] == [("a", (0, 1), 5.0), ("b", (2,), 5.0)]


def test_a_failure_is_reported_once_however_long_the_run_then_waits_for_workers() -> None:
    received: list[Event] = []
    events = ControllerEvents(received.append, NEEDS, node_table)
    restarting = RestartingState(training_failed_error=ControllerError(RuntimeError("lost")))
    events.after_controller_state_update(RunningState(), restarting)
    for _ in range(3):
        events.after_controller_state_update(restarting, restarting)
    assert [event.kind for event in received] == ["crash"]


def test_an_outage_of_the_storage_says_for_how_long_the_run_tries() -> None:
    received: list[Event] = []
    events = ControllerEvents(received.append, NEEDS, node_table, waits_for_storage=lambda: True)
    outage = RestartingState(training_failed_error=ControllerError(StorageError("cannot read s3://bucket: no answer")))
    events.after_controller_state_update(RunningState(), outage)
    (crash,) = received
    assert crash.message == (
        "The storage failed (cannot read s3://bucket: no answer); the run tries again with new groups for about half an hour."
    )
