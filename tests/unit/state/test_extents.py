"""Tests that what is decided for one tensor of a kind is what would be decided for each tensor by itself."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from undula.recovery.offers import Answer, chosen, combined, described, newest_complete
from undula.state.boxes import elements
from undula.state.checkpoint_files import share_of
from undula.state.extents import Extent, Kinds, are_complete
from undula.state.pieces import Holding, TensorSpec, is_complete

SHAPES = [(6,), (4, 2), ()]


@st.composite
def holdings(draw: st.DrawFn) -> list[Holding]:
    """Draw what processes hold: rows of some tensors each, of which some processes know only a part."""
    known = {f"tensor.{number}": draw(st.sampled_from(SHAPES)) for number in range(draw(st.integers(1, 6)))}
    found = []
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, unique=True))
        boxes: dict[str, Any] = {}
        for name in names:
            shape = known[name]
            begin = draw(st.integers(0, shape[0] // 2)) * 2 if shape else 0
            if not draw(st.booleans()):
                continue
            rows = (begin, *[0] * (len(shape) - 1)), (min(2, shape[0] - begin), *shape[1:]) if shape else ()
            boxes[name] = rows if shape else ((), ())
        found.append(Holding({name: TensorSpec("float32", known[name]) for name in names}, boxes))
    return found


@given(holdings())
def test_an_extent_has_the_boxes_of_each_tensor(held: list[Holding]) -> None:
    pairs = [Extent.of(each) for each in held]
    kinds = Kinds([extent for extent, _ in pairs], {extent.names: names for extent, names in pairs})
    for each, (extent, _) in zip(held, pairs, strict=True):
        reduced = kinds.holding(extent)
        for name, spec in each.expected.items():
            first = kinds.first_of[name]
            assert reduced.boxes.get(first) == each.boxes.get(name)
            assert reduced.expected[first].shape == spec.shape


@given(holdings(), st.lists(st.integers(0, 1), min_size=4, max_size=4))
def test_the_same_state_is_found_and_comes_from_the_same_sources(held: list[Holding], steps: list[int]) -> None:
    answers = [[Answer((1, step), each, "node")] for each, step in zip(held, steps, strict=False)]
    sent = [described(of_source) for of_source in answers]
    asked = combined([pairs for pairs, _ in sent], {digest: own for _, names in sent for digest, own in names.items()})
    age = newest_complete(answers)
    assert newest_complete(asked.answers) == age
    if age[1] >= 0:
        assert {*map(tuple, chosen(asked.answers, age))} == {*map(tuple, chosen(answers, age))}


@given(holdings(), st.booleans())
def test_a_state_is_complete_by_kinds_if_it_is_by_tensors(held: list[Holding], is_whole: bool) -> None:
    extents = [*map(Extent.of, held), *[None] * is_whole]
    assert are_complete(extents) == is_complete([*held, *[None] * is_whole])


def shares_by_tensor(held: list[Holding]) -> list[set[str]]:
    """Return the tensors that each process writes if each one is looked at by itself."""
    owners: dict[tuple[str, Any], list[int]] = {}
    for number, holding in enumerate(held):
        for name, box in holding.boxes.items():
            owners.setdefault((name, box), []).append(number)
    loads, found = [0] * len(held), [set[str]() for _ in held]
    for name, box in sorted(owners, key=lambda each: (len(owners[each]) > 1, -elements(each[1]), each)):
        least = min(owners[name, box], key=lambda number: (loads[number], number))
        loads[least] += elements(box)
        found[least].add(name)
    return found


@given(holdings())
def test_a_checkpoint_has_the_shares_that_each_tensor_by_itself_would_get(held: list[Holding]) -> None:
    pairs = [Extent.of(each) for each in held]
    extents, names = [extent for extent, _ in pairs], {extent.names: names for extent, names in pairs}
    shares = [share_of(rank, extents, names) for rank in range(len(held))]
    assert [*map(set, shares)] == shares_by_tensor(held)
    assert all(len(set(share)) == len(share) for share in shares)
