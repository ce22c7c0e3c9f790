"""What the controller keeps is always a whole state, and the newest."""

from hypothesis import given
from hypothesis import strategies as st
from torch import arange

from undula.elastic.keeper import SnapshotKeeper
from undula.state.parts import Part, RankState, is_complete
from undula.state.snapshot import Snapshot, packed, parsed

HALVES = ((0, 4), (4, 6))


def snapshot(step: int, half: int | None) -> Snapshot:
    """Of a tensor of ten numbers, all of it or half."""
    begin, size = HALVES[half] if half is not None else (0, 10)
    part = Part(arange(begin, begin + size), (10,), (begin,))
    meta, data = packed("plan", (1, step), RankState({"w": part}, {}), [])
    return parsed(meta, data)


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 1])), max_size=12))
def test_the_newest_of_which_all_parts_have_come_stays_whole(sent: list[tuple[int, int]]) -> None:
    keeper = SnapshotKeeper()
    for step, half in sent:
        keeper.keep(f"rank {half}", snapshot(step, half))
    whole = [step for step in range(1, 5) if {(step, 0), (step, 1)} <= set(sent)]
    kept = keeper.share(0, 1)
    assert {each.age for each in kept} == {(1, step) for step, _ in sent if not whole or step >= max(whole)}
    if whole:
        assert is_complete([each.sharding for each in kept if each.age == (1, max(whole))])


def test_ranks_fetch_all_of_it_together() -> None:
    keeper = SnapshotKeeper()
    for half in (0, 1):
        keeper.keep(f"rank {half}", snapshot(3, half))
    assert sorted(len(keeper.share(rank, 3)) for rank in range(3)) == [0, 1, 1]


def test_of_a_state_that_each_rank_has_whole_one_copy_is_kept() -> None:
    keeper = SnapshotKeeper()
    for step in (1, 2, 3):
        keeper.keep("rank 0", snapshot(step, None))
    assert [each.age for each in keeper.share(0, 1)] == [(1, 3)]
