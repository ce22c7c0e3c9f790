"""What the controller keeps is always a whole state, and the newest."""

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
    """Of a tensor of ten numbers, all of it or half."""
    begin, size = HALVES[half] if half is not None else (0, 10)
    part = Piece(arange(begin, begin + size), (10,), (begin,))
    meta, data = packed("plan", (1, step), RankState({"w": part}, {}), [])
    return parsed(meta, data)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_the_newest_of_which_all_parts_have_come_stays_whole(comes: list[tuple[bool, bool]]) -> None:
    """Rank 0 sends a half at each step; rank 1's half does not come at all, or comes only after rank 0's next."""
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
        assert len(kept) <= 2 + UNFINISHED  # two halves, and what has come of newer ones
        if whole:
            assert is_complete([each.holding for each in kept if each.age == (1, whole)])


def test_ranks_fetch_all_of_it_together() -> None:
    store = ReplicaStore()
    for half in (0, 1):
        store.keep(f"rank {half}", snapshot(3, half))
    assert sorted(len(store.share(rank, 3)) for rank in range(3)) == [0, 1, 1]


def test_of_a_state_that_each_rank_has_whole_one_copy_is_kept() -> None:
    store = ReplicaStore()
    for step in (1, 2, 3):
        store.keep("rank 0", snapshot(step, None))
    assert [each.age for each in store.share(0, 1)] == [(1, 3)]


def test_a_worker_exports_a_state_that_is_newer_and_has_room() -> None:
    worker = SimpleNamespace(_state=WorkerState())
    export: Any = partial(ElasticWorker.export_state, worker)
    assert export(room=1e9, newest=NEVER) is None
    state = RankState({"w": Piece(arange(10), (10,), (0,))}, {})
    worker._state.held = HeldState("plan", 1, 3, state, ())
    meta, data = export(room=80, newest=(1, 2))
    assert parsed(meta, bytearray(data)).age == (1, 3)
    assert export(room=80, newest=(1, 3)) is None
    assert export(room=79, newest=NEVER).endswith("more than half of the memory that is free on the head")
