"""Tests of the order in which runs that wait for workers give them back to each other."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until

from undula.elastic.pure.sharing import PATIENCE_S, WaitingRun, patience_s, rivals
from undula.elastic.ray import waiting_runs
from undula.elastic.ray.waiting_runs import FRESH_S, STARTING_S, WaitingRuns, WorkerSharing
from undula.state.events import Event, GiveWayEvent

RUNS = st.lists(
    st.builds(
        WaitingRun,
        id=st.uuids().map(str),
        name=st.just("run"),
        needed=st.integers(1, 4),
        ready=st.integers(0, 3),
        since=st.sampled_from([1.0, 2.0]),
        has_trained=st.booleans(),
        resources=st.just(("CPU",)),
    ),
    min_size=2,
    max_size=5,
    unique_by=lambda run: run.id,
)


def waiting(id: str, ready: int = 1, **more: Any) -> WaitingRun:
    return WaitingRun(
        **{
            "id": id,
            "name": id,
            "needed": 3,
            "ready": ready,
            "since": 1.0,
            "has_trained": False,
            "resources": ("CPU",),
            **more,
        }
    )


@given(RUNS)
def test_one_run_after_another_gives_way(runs: list[WaitingRun]) -> None:
    patience = sorted(patience_s(run, [other for other in runs if other != run]) for run in runs)
    assert patience == [PATIENCE_S * place for place in range(1, len(runs) + 1)]


@pytest.mark.parametrize("more", [{"has_trained": True}, {"ready": 2}, {"needed": 2}, {"since": 0.5}])
def test_a_run_is_more_patient_if_it_has_steps_to_lose_or_lacks_less_or_has_waited_longer(more: dict[str, Any]) -> None:
    own, other = waiting("z", **more), waiting("a")
    assert patience_s(own, [other]) == 2 * patience_s(other, [own])


def test_runs_without_a_common_resource_do_not_wait_for_each_other() -> None:
    own = waiting("a", resources=("CPU", "GPU"))
    assert rivals(own, [waiting("b", resources=("TPU",)), waiting("c", resources=("GPU",))]) == [
        waiting("c", resources=("GPU",))
    ]


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_a_run_gives_its_workers_back_for_a_while_and_then_starts_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, events = Clock(), list[Event]()
    monkeypatch.setattr(waiting_runs, "time", clock)
    pool: Any = SimpleNamespace(gives_way=False, must_stay=False, preparing=0)
    runs: Any = SimpleNamespace(others=[], tell=lambda own: None, withdraw=lambda: None)
    sharing = WorkerSharing(pool, events.append, runs)

    def after(seconds: float, ready: int = 1) -> bool:
        clock.now += seconds
        sharing.waits(waiting("z", ready))
        return bool(pool.gives_way)

    assert not after(1000), "no other run waits"
    runs.others = [waiting("a", ready=2)]
    assert sharing.waits(waiting("z")) == ("a",)
    assert not after(PATIENCE_S - 1)
    assert not after(2, ready=2), "one more worker is ready"
    pool.preparing = 1
    assert not after(1000, ready=2), "a worker has begun to start"
    assert not after(PATIENCE_S + STARTING_S - 1, ready=2)
    assert after(2, ready=2), "it waits for what the other run holds"
    pool.preparing = 0
    (event,) = events
    assert isinstance(event, GiveWayEvent)
    assert (event.workers, event.rivals) == (2, ("a",))
    assert after(PATIENCE_S - 1, ready=0)
    assert not after(PATIENCE_S + 2, ready=0), "the pause is over"
    assert not after(1000, ready=0), "there is nothing to give back"
    assert not after(1, ready=1)
    assert after(PATIENCE_S + 1, ready=1)
    runs.others = []
    assert not after(1, ready=0), "no other run waits any more"


def test_a_run_whose_worker_crashes_again_and_again_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, events = Clock(), list[Event]()
    monkeypatch.setattr(waiting_runs, "time", clock)
    pool: Any = SimpleNamespace(gives_way=False, must_stay=False, preparing=0)
    runs: Any = SimpleNamespace(others=[waiting("a", ready=2)], tell=lambda own: None, withdraw=lambda: None)
    sharing = WorkerSharing(pool, events.append, runs)
    for number in range(60):
        clock.now += 1
        pool.preparing = number // 5 % 2
        sharing.waits(waiting("z"))
    assert len(events) == 1


class Storage:
    """Key-value store of a head, which answers while it is open."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.is_open, self.is_asked = threading.Event(), threading.Event()
        self.is_open.set()

    def _internal_kv_put(self, key: bytes, value: bytes, **_: object) -> None:
        self.entries[key] = value

    def _internal_kv_get(self, key: bytes, **_: object) -> bytes | None:
        return self.entries.get(key)

    def _internal_kv_list(self, prefix: bytes, **_: object) -> list[bytes]:
        self.is_asked.set()
        self.is_open.wait()
        return list(self.entries)

    def _internal_kv_del(self, key: bytes, **_: object) -> None:
        self.entries.pop(key, None)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    storage = Storage()
    monkeypatch.setattr(waiting_runs, "_storage", lambda: storage)
    return storage


def test_a_run_that_waits_no_more_leaves_no_entry_even_while_the_head_is_slow(storage: Storage) -> None:
    storage.is_open.clear()
    runs = WaitingRuns()
    runs.tell(waiting("a"))
    storage.is_asked.wait()
    runs.withdraw()
    assert storage.entries, "the head has not answered yet"
    storage.is_open.set()
    wait_until(lambda: not storage.entries, 10)
    runs.tell(waiting("a"))
    wait_until(lambda: bool(storage.entries), 10)


def test_entries_of_controllers_that_have_ended_are_deleted(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, runs, own = Clock(), WaitingRuns(), waiting("a")
    monkeypatch.setattr(waiting_runs, "time", clock)
    storage.entries[b"dead"] = b"an entry of another version"

    def exchanged() -> set[bytes]:
        storage.is_asked.clear()
        clock.now += FRESH_S / 2
        wait_until(lambda: runs.tell(own) or storage.is_asked.is_set(), 10)
        storage.entries[b"alive"] = str(clock.now).encode()
        return {*storage.entries}

    assert exchanged() == exchanged() == {b"a", b"alive", b"dead"}
    exchanged()
    wait_until(lambda: b"dead" not in storage.entries, 10)
    assert exchanged() == exchanged() == {b"a", b"alive"}
