"""Tests of the tree over virtual workers: sums along it have the same bits for any assignment, and assignments have few roots."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.plan.tree import Fold, assign, combined, halves, roots


def _assignments(virtual_workers: int, world_size: int) -> list[tuple[range, ...]]:
    """Return all assignments in which each rank has a virtual worker."""
    all_cuts = combinations(range(1, virtual_workers), world_size - 1)
    return [tuple(range(*pair) for pair in pairwise((0, *cuts, virtual_workers))) for cuts in all_cuts]


def _num_roots(virtual_workers: int, shares: tuple[range, ...]) -> list[int]:
    return [len(roots(virtual_workers, share.start, share.stop)) for share in shares]


def _bits(value: np.float32) -> bytes:
    return value.tobytes()


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32).map(np.float32), min_size=1, max_size=10))
def test_each_assignment_gives_the_same_bits(leaves: list[np.float32]) -> None:
    virtual_workers = len(leaves)

    def total(shares: tuple[range, ...]) -> np.float32:
        known = {}
        for share in shares:
            fold = Fold[np.float32](virtual_workers, lambda one, other: one + other)
            for place in share:
                fold.push(place, leaves[place])
            assert tuple(fold.roots) == roots(virtual_workers, share.start, share.stop)
            assert len(fold.roots) <= 2 * max(virtual_workers - 1, 1).bit_length()
            known |= fold.roots
        return combined((0, virtual_workers), known, lambda one, other: one + other)

    for world_size in range(1, virtual_workers + 1):
        assert {_bits(total(shares)) for shares in _assignments(virtual_workers, world_size)} == {
            _bits(total((range(virtual_workers),)))
        }


@given(st.integers(2, 2000))
def test_halves_are_next_to_each_other_and_the_first_is_the_larger_one(virtual_workers: int) -> None:
    (begin, middle), (again, end) = halves((0, virtual_workers))
    assert (begin, middle, end) == (0, again, virtual_workers)
    assert virtual_workers // 2 <= middle < virtual_workers
    assert middle.bit_count() == 1


@given(st.integers(1, 300), st.integers(1, 300))
def test_an_assignment_is_contiguous_covers_all_and_keeps_the_longest_share_short(
    virtual_workers: int, world_size: int
) -> None:
    ranks = assign(virtual_workers, world_size)
    assert len(ranks) == world_size
    assert [v for rank in ranks for v in rank] == list(range(virtual_workers))
    assert max(map(len, ranks)) == -(-virtual_workers // world_size)
    assert min(map(len, ranks)) >= (world_size <= virtual_workers)


@pytest.mark.parametrize("virtual_workers", range(1, 13))
def test_an_assignment_has_the_fewest_roots_in_all_and_then_on_any_rank(virtual_workers: int) -> None:
    for world_size in range(1, virtual_workers + 1):
        longest = -(-virtual_workers // world_size)
        counts = [
            _num_roots(virtual_workers, shares)
            for shares in _assignments(virtual_workers, world_size)
            if max(map(len, shares)) == longest
        ]
        found = _num_roots(virtual_workers, assign(virtual_workers, world_size))
        assert (sum(found), max(found)) == min((sum(count), max(count)) for count in counts)


def test_equal_shares_are_subtrees_where_the_numbers_are_powers_of_two() -> None:
    assert assign(8, 4) == (range(2), range(2, 4), range(4, 6), range(6, 8))
    assert _num_roots(64, assign(64, 8)) == [1] * 8
    assert [len(share) for share in assign(6, 4)] == [1, 1, 2, 2]
