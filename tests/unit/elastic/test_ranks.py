"""Tests that the ranks of a new group keep the most that any choice of numbers lets them keep."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undula.elastic.pure.ranks import Place, common, order_by_state


def kept(order: tuple[int, ...] | list[int], places: list[Place | None]) -> float:
    """Return which part of the state the workers have of what their new ranks need, summed over the ranks."""
    return sum(common(places[worker], (rank, len(order))) for rank, worker in enumerate(order))


@st.composite
def former(draw: st.DrawFn) -> list[Place | None]:
    ranks = draw(st.integers(1, 5))
    staying = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    places: list[Place | None] = [(rank, ranks) for rank in staying]
    places += [None] * draw(st.integers(0, 6 - len(places)))  # all orders of more are too many
    return draw(st.permutations(places))


@settings(max_examples=400)
@given(former())
def test_no_other_order_keeps_more(places: list[Place | None]) -> None:
    order = order_by_state(places)
    assert sorted(order) == list(range(len(places)))
    assert kept(order, places) == pytest.approx(max(kept(each, places) for each in permutations(range(len(places)))))


@pytest.mark.parametrize(
    ("places", "moved"),
    [
        ([(0, 1), None], 1 / 2),
        ([(0, 2), (1, 2), None], 1 / 3),
        ([(0, 3), (2, 3)], 1 / 3),
        ([(0, 3), (1, 3)], 1 / 2),
        ([(1, 3), (2, 3)], 1 / 2),
        ([(1, 2)], 1 / 2),
    ],
)
def test_what_moves_in_a_planned_change(places: list[Place | None], moved: float) -> None:
    assert 1 - kept(order_by_state(places), places) == pytest.approx(moved)
