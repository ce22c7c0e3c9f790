"""Tests that the replica store always has the newest complete state."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from torch import arange

from undula.elastic.ray.actor import ElasticWorker
from undula.recovery.replica_store import UNFINISHED, ReplicaStore
from undula.recovery.snapshot import NEVER, Snapshot, packed, parsed
from undula.recovery.worker_state import HeldState, WorkerState
from undula.state.pieces import Piece, RankState, is_complete

HALVES = ((0, 4), (4, 6))


def snapshot(step: int, half: int | None) -> Snapshot:
    """Return a snapshot of a tensor of ten numbers, or of one half of it."""
    begin, size = HALVES[half] if half is not None else (0, 10)
    part = Piece(arange(begin, begin + size), (10,), (begin,))
    meta, data = packed("plan", (1, step), RankState({"w": part}, {}), [])
    return parsed(meta, data)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_the_newest_complete_snapshot_is_kept(comes: list[tuple[bool, bool]]) -> None:
    """Rank 0 sends its half at each step. The half of rank 1 is missing, or comes only after the next one of rank 0."""
    store = ReplicaStore()
    whole, late = 0, 0
    for step, (comes_at_all, is_late) in enumerate(comes, 1):
        store.keep("rank 0", snapshot(step, 0))
        for ready in (late, step if comes_at_all and not is_late else 0):
            if ready:
                store.keep("rank 1", snapshot(ready, 1))
                whole = max(whole, ready)
        late = step if comes_at_all and is_late else 0
        assert store.newest_whole == ((1, whole) if whole else NEVER)
        kept = store.share(0, 1)
        assert len(kept) <= 2 + UNFINISHED  # two halves, and the incomplete newer ones
        if whole:
            assert is_complete([each.holding for each in kept if each.age == (1, whole)])


def test_all_ranks_together_fetch_the_whole_state() -> None:
    store = ReplicaStore()
    for half in (0, 1):
        store.keep(f"rank {half}", snapshot(3, half))
    assert sorted(len(store.share(rank, 3)) for rank in range(3)) == [0, 1, 1]


def test_one_copy_of_a_replicated_state_is_kept() -> None:
    store = ReplicaStore()
    for step in (1, 2, 3):
        store.keep("rank 0", snapshot(step, None))
    assert [each.age for each in store.share(0, 1)] == [(1, 3)]


def test_a_worker_exports_a_state_that_is_newer_and_fits() -> None:
    worker = SimpleNamespace(_state=WorkerState())
    export: Any = partial(ElasticWorker.export_state, worker)
    assert export(room=1e9, newest=NEVER) is None
    state = RankState({"w": Piece(arange(10), (10,), (0,))}, {})
    worker._state.held = HeldState("plan", 1, 3, state, ())
    meta, data = export(room=80, newest=(1, 2))
    assert parsed(meta, bytearray(data)).age == (1, 3)
    assert export(room=80, newest=(1, 3)) is None
    assert export(room=79, newest=NEVER).endswith("more than half of the memory that is free on the head")
