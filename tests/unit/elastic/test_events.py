"""Events reach their sink in order, and hold nobody up."""

import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.train.v2._internal.execution.controller.state import PreemptingState, RunningState
from ray.train.v2.api.preemption import PreemptionInfo

from undula.elastic.ray.events import ControllerEvents, EventQueue
from undula.state.events import CrashEvent, Event, FaultEvent, GroupEvent, NoticeEvent, WaitingEvent, WorkerPlace
from undula.state.ledger import decode_events, read_ledger
from undula.storage import Store
from undula.telemetry.hub import EventRecorder


def test_a_slow_sink_holds_nobody_up_and_gets_all_in_order() -> None:
    told: list[Event] = []
    may_go_on = threading.Event()

    def slow(event: Event) -> None:
        assert may_go_on.wait(10)
        told.append(event)

    queue = EventQueue(slow)
    events = [FaultEvent(str(number)) for number in range(5)]
    for event in events:
        queue(event)
    assert told == []
    may_go_on.set()
    queue.close()
    assert told == events


def test_what_the_storage_did_not_take_is_told_with_the_next_event_and_all_in_one_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    tell: EventRecorder = pickle.loads(pickle.dumps(EventRecorder(store, print)))  # type: ignore[arg-type]
    events = tuple(FaultEvent(name, time=time) for time, name in enumerate(("first", "second", "third")))
    tell(events[0])
    (folder,) = tmp_path.glob("run/ledger")
    folder.rename(tmp_path / "away")
    folder.touch()  # a file where the folder was
    tell(events[1])
    folder.unlink()
    tell(events[2])
    assert decode_events(read_ledger(store).events) == events
    assert len(store.list("ledger")) == 1


SPOT = {"undula.io/machine": "g6.xlarge", "undula.io/market": "spot", "ray.io/market-type": "on-demand",
        "ray.io/availability-region": "us-west-2", "ray.io/availability-zone": "us-west-2a"}  # fmt: skip


def node_table() -> list[dict[str, Any]]:
    """As ray.nodes() gives it: one node with all labels, one with Ray's own alone, one with none."""
    labels = {"spot": SPOT, "rays": {"ray.io/market-type": "on-demand", "ray.io/node-id": "rays"}, "bare": {}}
    return [{"NodeID": node, "Alive": True, "Labels": told} for node, told in labels.items()]


def worker(node: str, pid: int) -> Any:
    return SimpleNamespace(node=node, metadata=SimpleNamespace(node_id=node, node_ip="10.0.0.1", pid=pid))


def test_a_group_says_on_which_machines_its_ranks_are_as_far_as_labels_do() -> None:
    told: list[Event] = []
    members = [worker("spot", 1), worker("rays", 2), worker("bare", 3), worker("gone", 4)]
    ControllerEvents(told.append, node_table).after_worker_group_training_start(
        SimpleNamespace(get_workers=lambda: members)  # type: ignore[arg-type]
    )
    ip: WorkerPlace = {"ip": "10.0.0.1"}
    labels: WorkerPlace = {"machine": "g6.xlarge", "market": "spot", "region": "us-west-2", "zone": "us-west-2a"}
    (group,) = told
    assert isinstance(group, GroupEvent)
    assert group.workers == (
        {"rank": 0, "node": "spot", "pid": 1, **ip, **labels},
        {"rank": 1, "node": "rays", "pid": 2, **ip, "market": "on-demand"},
        {"rank": 2, "node": "bare", "pid": 3, **ip},
        {"rank": 3, "node": "gone", "pid": 4, **ip},
    )


def test_a_wait_says_on_which_machines_those_who_are_ready_are() -> None:
    told: list[Event] = []
    events = ControllerEvents(told.append, node_table)
    tell = events.with_ready_workers(lambda: [worker("spot", 1), worker("bare", 2)])
    lost = CrashEvent("hang", rank=1)
    tell(WaitingEvent(2))
    tell(lost)
    events.after_worker_group_training_start(SimpleNamespace(get_workers=list))  # type: ignore[arg-type]
    tell(WaitingEvent(2))
    waiting, crash, _, later = told
    assert isinstance(waiting, WaitingEvent)
    assert isinstance(later, WaitingEvent)
    assert waiting.job == later.job
    assert waiting.job != ControllerEvents(told.append, node_table)._job
    assert waiting.ready == 2
    assert [each.get("machine") for each in waiting.workers] == ["g6.xlarge", None]
    assert [(each["node"], each["pid"]) for each in waiting.workers] == [("spot", 1), ("bare", 2)]
    assert crash == lost


def test_a_preemption_becomes_a_notice_for_each_node() -> None:
    told: list[Event] = []
    state = PreemptingState(PreemptionInfo(5_000, {"a": [0, 1], "b": [2]}), detected_at_s=1.0)
    ControllerEvents(told.append, node_table).after_controller_state_update(RunningState(), state)
    notices = [event for event in told if isinstance(event, NoticeEvent)]
    assert [(event.node, event.ranks, event.deadline) for event in notices] == [("a", (0, 1), 5.0), ("b", (2,), 5.0)]
