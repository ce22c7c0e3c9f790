"""Events reach their sink in order, and hold nobody up."""

import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from undula.elastic.ray.events import ControllerEvents, EventQueue
from undula.state.ledger import read_ledger
from undula.state.records import Event
from undula.storage import Store
from undula.telemetry.hub import TellEverywhere


def test_a_slow_sink_holds_nobody_up_and_gets_all_in_order() -> None:
    told: list[str] = []
    may_go_on = threading.Event()

    def slow(event: Event) -> None:
        assert may_go_on.wait(10)
        told.append(event.message)

    queue = EventQueue(slow)
    for number in range(5):
        queue(Event("notice", str(number)))
    assert told == []
    may_go_on.set()
    queue.close()
    assert told == ["0", "1", "2", "3", "4"]


def test_what_the_storage_did_not_take_is_told_with_the_next_event_and_all_in_one_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    tell: TellEverywhere = pickle.loads(pickle.dumps(TellEverywhere(store, print)))  # type: ignore[arg-type]
    tell(Event("group", "first"))
    (folder,) = tmp_path.glob("run/ledger")
    folder.rename(tmp_path / "away")
    folder.touch()  # a file where the folder was
    tell(Event("group", "second"))
    folder.unlink()
    tell(Event("group", "third"))
    assert read_ledger(store).events["message"].to_pylist() == ["first", "second", "third"]
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
    places = {"ip": "10.0.0.1"}
    labels = {"machine": "g6.xlarge", "market": "spot", "region": "us-west-2", "zone": "us-west-2a"}
    assert told[0].data["workers"] == [
        {"rank": 0, "node": "spot", "pid": 1, **places, **labels},
        {"rank": 1, "node": "rays", "pid": 2, **places, "market": "on-demand"},
        {"rank": 2, "node": "bare", "pid": 3, **places},
        {"rank": 3, "node": "gone", "pid": 4, **places},
    ]


def test_a_wait_says_on_which_machines_those_who_are_ready_are() -> None:
    told: list[Event] = []
    events = ControllerEvents(told.append, node_table)
    tell = events.naming_ready(lambda: [worker("spot", 1), worker("bare", 2)])
    tell(Event("waiting", "waiting for 1 more", data={"ready": 2}))
    tell(Event("crash", "a worker was lost", data={"rank": 1}))
    events.after_worker_group_training_start(SimpleNamespace(get_workers=list))  # type: ignore[arg-type]
    tell(Event("waiting", "waiting for 1 more", data={"ready": 2}))
    waiting, crash, _, later = told
    assert waiting.data["job"] == later.data["job"]
    assert waiting.data["job"] != ControllerEvents(told.append, node_table)._job
    assert waiting.data["ready"] == 2
    assert [each.get("machine") for each in waiting.data["workers"]] == ["g6.xlarge", None]
    assert [(each["node"], each["pid"]) for each in waiting.data["workers"]] == [("spot", 1), ("bare", 2)]
    assert crash.data == {"rank": 1}
