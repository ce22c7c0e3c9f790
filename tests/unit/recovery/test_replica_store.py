"""Tests that the replica store always has the newest complete state."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import arange

from undula.elastic.ray.actor import ElasticWorker
from undula.recovery import replica_store
from undula.recovery.replica_store import Replica, ReplicaStore
from undula.recovery.snapshot import NEVER, packed
from undula.recovery.worker_state import HeldState, WorkerState
from undula.state.extents import are_complete
from undula.state.pieces import Piece, RankState, TensorSpec

HALVES = ((0, 4), (4, 6))


def replica(step: int, half: int | None) -> Replica:
    """Return a replica of a tensor of ten numbers, or of one half of it."""
    begin, size = HALVES[half] if half is not None else (0, 10)
    part = Piece(arange(begin, begin + size), (10,), (begin,))
    meta, data = packed("plan", (1, step), RankState({"w": part}, {}), [])
    return Replica.of(meta, data)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_the_newest_complete_state_is_kept_and_one_newer_incomplete_state(comes: list[tuple[bool, bool]]) -> None:
    """Either half of each step's state may be lost on its way."""
    store, whole = ReplicaStore(), 0
    for step, halves in enumerate(comes, 1):
        for half, comes_at_all in enumerate(halves):
            if comes_at_all:
                assert store.keep(f"rank {half}", replica(step, half))
        whole = step if all(halves) else whole
        assert store.newest_whole == ((1, whole) if whole else NEVER)
        kept = store.share(0, 1)
        assert len({each.age for each in kept}) <= 2
        if whole:
            assert are_complete(each.extent for each in kept if each.age == (1, whole))


def test_a_state_is_complete_when_all_ranks_have_sent_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def counting(extents: Any) -> bool:
        looks.append(len(found := list(extents)))
        return are_complete(found)

    monkeypatch.setattr(replica_store, "are_complete", counting)
    store = ReplicaStore()
    for half in (0, 1):
        assert store.newest_whole == NEVER
        assert store.keep(f"rank {half}", replica(3, half), senders=2)
    assert (store.newest_whole, looks) == ((1, 3), [2])


def test_parts_of_older_states_are_refused() -> None:
    store = ReplicaStore()
    for half in (0, 1):
        assert store.keep(f"rank {half}", replica(3, half))
    assert store.keep("rank 0", replica(5, 0))
    assert not store.admits((1, 4), 80)
    assert not store.keep("rank 1", replica(4, 1))
    assert not store.keep("rank 1", replica(3, 1))
    assert store.newest_whole == (1, 3)


class Head:
    """Head with a given amount of memory, to which the ranks of a sharded model send their parts of 1 MiB."""

    def __init__(self, memory_mib: int, monkeypatch: pytest.MonkeyPatch):
        self.store, self.memory = ReplicaStore(), memory_mib * 2**20
        self.least = self.memory
        monkeypatch.setattr(replica_store, "available_memory", lambda: self.memory - self.held)

    @property
    def held(self) -> int:
        return sum(len(each.data) for each in self.store.share(0, 1))

    def send(self, ranks: int, step: int) -> list[bool]:
        """Send the parts of a state as far as they are admitted. Return the answer to each rank."""
        answers = []
        for rank in range(ranks):
            piece = Piece(torch.zeros(2**20, dtype=torch.uint8), (ranks * 2**20,), (rank * 2**20,), False)
            meta, data = packed("plan", (1, step), RankState({"w": piece}, {}), [])
            answers.append(self.store.admits((1, step), ranks * 2**20))
            if answers[-1]:
                self.store.keep(f"rank {rank}", Replica.of(meta, data))
            self.least = min(self.least, self.memory - self.held)
        return answers


@pytest.mark.parametrize(
    ("memory_mib", "sends", "newest"),
    [
        # A state of 8 MiB that fits twice is replaced by the next one.
        (32, [(8, True), (8, True), (8, True)], 30),
        # One that fits only once is not stored, because no newer one could replace it.
        (31, [(8, False), (8, False)], None),
        # One of another size is admitted by its own size.
        (32, [(8, True), (9, False), (4, True)], 30),
        # One that does not fit is refused as a whole.
        (30, [(64, False), (64, False)], None),
    ],
)
def test_a_state_is_admitted_if_it_fits(
    monkeypatch: pytest.MonkeyPatch, memory_mib: int, sends: list[tuple[int, bool]], newest: int | None
) -> None:
    head = Head(memory_mib, monkeypatch)
    for number, (ranks, is_admitted) in enumerate(sends, 1):
        assert head.send(ranks, 10 * number) == [is_admitted] * ranks
    assert head.store.newest_whole == (NEVER if newest is None else (1, newest))
    assert head.least >= head.memory / 2
    assert newest is not None or head.held == 0


def test_a_refused_state_stays_refused_although_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(30, monkeypatch)
    assert head.send(8, 10) == [False] * 8
    head.memory *= 2
    assert head.send(8, 10) == [False] * 8
    assert head.send(8, 20) == [True] * 8


def test_one_copy_of_a_state_is_kept_and_all_ranks_together_fetch_it() -> None:
    store = ReplicaStore()
    for step in (1, 2, 3):
        store.keep("rank 0", replica(step, None))
    assert [each.age for each in store.share(0, 1)] == [(1, 3)]
    for half in (0, 1):
        store.keep(f"rank {half}", replica(4, half))
    assert sorted(len(store.share(rank, 3)) for rank in range(3)) == [0, 1, 1]


def test_a_worker_exports_a_state_that_is_newer_and_fits() -> None:
    worker = SimpleNamespace(_state=WorkerState())
    export: Any = partial(ElasticWorker.export_state, worker, known=NEVER)
    assert export(room=1e9, newest=NEVER) is None
    state = RankState({"w": Piece(arange(10), (10,), (0,))}, {})
    worker._state.held = HeldState("plan", 1, 3, state, ())
    meta, data = export(room=80, newest=(1, 2))
    assert Replica.of(meta, bytearray(data)).age == (1, 3)
    assert export(room=80, newest=(1, 3)) is None
    assert export(room=79, newest=NEVER).endswith("more than half of the memory that is free on the head")
    part = Piece(arange(5), (10,), (0,), is_replicated=False)
    worker._state.held = HeldState("plan", 1, 3, RankState({"w": part}, {}), ())
    assert export(room=79, newest=NEVER).startswith("its size of")  # the rest of the state would not fit


def test_what_all_ranks_hold_is_exported_by_one_worker() -> None:
    common, rows = Piece(arange(10), (10,), (0,)), [Piece(arange(2), (2,), (0,), is_replicated=False)] * 2
    spec = TensorSpec(str(common.tensor.dtype).removeprefix("torch."), (2,), (1,))
    states = [RankState({"w": common, f"r.{rank}": rows[rank]}, {}, {f"r.{1 - rank}": spec}) for rank in (0, 1)]
    store, sizes, known = ReplicaStore(), [], NEVER
    for rank, state in enumerate(states):
        worker = SimpleNamespace(_state=WorkerState(held=HeldState("plan", 1, 3, state, ())))
        meta, data = ElasticWorker.export_state(worker, 1e9, NEVER, known)  # type: ignore[arg-type, misc]
        replica, known = Replica.of(meta, bytearray(data)), (1, 3)
        store.keep(str(rank), replica)
        sizes.append(len(data))
    assert sizes == [192, 64], "each tensor begins at a multiple of 64 bytes"
    assert store.newest_whole == (1, 3)
