"""Tests of exact sums: the result is correct and does not depend on order and grouping."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from undula.errors import UsageError
from undula.parallel.reduce import exact
from undula.parallel.reduce.exact import LIMIT, MOST_ADDED, ExactSum, exact_total, total_value

FLOAT32 = st.floats(-1e5, 1e5, width=32)


def summed(numbers: list[float]) -> float:
    sums = ExactSum([torch.zeros(1)])
    for number in numbers:
        sums.add([torch.tensor([number], dtype=torch.float32)])
    return float(sums.values()[0])


@given(numbers=st.lists(FLOAT32, min_size=1, max_size=50), data=st.data())
def test_sums_do_not_depend_on_the_order(numbers: list[float], data: st.DataObject) -> None:
    assert summed(numbers) == summed(data.draw(st.permutations(numbers)))


@given(numbers=st.lists(FLOAT32, min_size=1, max_size=50))
def test_sums_equal_exact_arithmetic(numbers: list[float]) -> None:
    right = sum(map(Fraction, numbers))
    assert abs(Fraction(summed(numbers)) - right) <= abs(right) * Fraction(2) ** -52 + len(numbers) * Fraction(2) ** -66


def test_a_value_that_is_not_finite_or_too_large_makes_only_its_own_sum_nan() -> None:
    sums = ExactSum([torch.zeros(2), torch.zeros(1), torch.zeros(1), torch.zeros(1)])
    sums.add([torch.tensor([1.0, 2.0]), torch.tensor([math.inf]), torch.tensor([-LIMIT]), None])
    whole, infinite, large, missing = sums.values()
    assert whole.tolist() == [1.0, 2.0]
    assert infinite.isnan().all()
    assert large.isnan().all()
    assert missing is None
    sums.clear()
    assert sums.values() == [None] * 4


@pytest.mark.parametrize("chunk", [1, 7, 2**20])
def test_sums_that_are_added_together_are_those_of_each_alone(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "CHUNK", chunk)
    torch.manual_seed(0)
    kinds = [((3, 5), torch.float32), ((0,), torch.float32), ((17,), torch.float64), ((2, 2, 3, 3), torch.bfloat16)]
    like = [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]
    together, alone = ExactSum(like), [ExactSum([each]) for each in like]
    for power in range(-12, 9, 3):
        terms = [torch.randn_like(each) * 10.0**power for each in like]
        terms[3] = terms[3].to(memory_format=torch.channels_last)
        given = [None if power == place else term for place, term in enumerate(terms)]
        copies = [term.clone() for term in terms]
        together.add(given)
        for sums, term in zip(alone, given, strict=True):
            sums.add([term])
        assert all(map(torch.equal, terms, copies)), "the gradients are needed afterwards"
    for found, sums in zip(together.values(), alone, strict=True):
        (expected,) = sums.values()
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


def test_the_maximum_number_of_largest_values_stays_in_range_and_one_more_is_refused() -> None:
    largest = math.nextafter(LIMIT, 0.0)
    sums = ExactSum([torch.zeros(1)])
    for _ in range(MOST_ADDED):
        sums.add([torch.tensor([largest], dtype=torch.float64)])
    assert float(sums.values()[0]) == pytest.approx(MOST_ADDED * largest)
    sums.clear()
    for _ in range(MOST_ADDED):
        sums.add([torch.tensor([-1e-25], dtype=torch.float64)])
    assert float(sums.values()[0]) == pytest.approx(0, abs=1e-15)
    sums.add([torch.tensor([1.0])])
    with pytest.raises(
        UsageError, match="this step has 8192 micro-batches, but deterministic=true can sum at most 8191"
    ):
        sums.values()


@given(numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20), cut=st.integers(0, 20))
def test_totals_do_not_depend_on_the_partition(numbers: list[float], cut: int) -> None:
    (one, _), (other, _) = exact_total(numbers[:cut]), exact_total(numbers[cut:])
    assert one + other == exact_total(numbers)[0]
    if sum(map(abs, numbers)) < 1e300:
        assert total_value(one + other, 0.0) == pytest.approx(math.fsum(numbers), rel=1e-15, abs=len(numbers) * 2**-79)
