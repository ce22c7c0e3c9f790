"""Tests of the arithmetic of boxes, compared with sets of elements."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from undula.state.boxes import Box, difference, elements, intersection, split, whole_box, without

SIDES = st.tuples(st.integers(0, 4), st.integers(0, 4))


def boxes(dimensions: int) -> st.SearchStrategy[Box]:
    sides = st.lists(SIDES, min_size=dimensions, max_size=dimensions)
    return sides.map(lambda each: (tuple(begin for begin, _ in each), tuple(size for _, size in each)))


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(begin, begin + size) for begin, size in zip(*box, strict=True))))


PAIRS = st.integers(0, 3).flatmap(lambda dimensions: st.tuples(boxes(dimensions), boxes(dimensions)))
SEVERAL = st.integers(1, 2).flatmap(
    lambda dimensions: st.tuples(boxes(dimensions), st.lists(boxes(dimensions), max_size=4))
)


@given(PAIRS)
def test_two_boxes_are_what_they_have_in_common_and_the_rest(pair: tuple[Box, Box]) -> None:
    one, other = pair
    common = intersection(one, other)
    assert (cells(common) if common else set()) == cells(one) & cells(other)
    parts = difference(one, other)
    assert sum(map(elements, parts)) == len(cells(one) - cells(other))
    assert set().union(*map(cells, parts)) == cells(one) - cells(other)


@given(SEVERAL)
def test_a_box_without_others_has_the_elements_that_none_of_them_has(given: tuple[Box, list[Box]]) -> None:
    box, others = given
    rest = without(box, others)
    assert set().union(*map(cells, rest)) == cells(box).difference(*map(cells, others))
    assert sum(map(elements, rest)) == len(set().union(*map(cells, rest)))


@given(st.integers(0, 3).flatmap(boxes), st.integers(1, 9))
def test_the_parts_of_a_box_are_small_and_in_the_order_of_its_elements(box: Box, most: int) -> None:
    parts = split(box, most)
    assert all(0 < elements(part) <= most for part in parts)
    assert [cell for part in parts for cell in sorted(cells(part))] == sorted(cells(box))


def test_a_whole_box_has_all_elements() -> None:
    assert whole_box((2, 3)) == ((0, 0), (2, 3))
    assert elements(whole_box(())) == 1
