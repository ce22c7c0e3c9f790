"""Tests of exact sums: the result is correct and does not depend on order and grouping."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from undula.errors import UsageError
from undula.parallel.reduce.exact import LIMIT, MOST_ADDED, ExactSum, exact_total, total_value

FLOAT32 = st.floats(-1e5, 1e5, width=32)


def summed(numbers: list[float]) -> float:
    sums = ExactSum([torch.zeros(1)])
    for number in numbers:
        sums.add(0, torch.tensor([number], dtype=torch.float32))
    return float(sums.values()[0])


@given(numbers=st.lists(FLOAT32, min_size=1, max_size=50), data=st.data())
def test_sums_do_not_depend_on_the_order(numbers: list[float], data: st.DataObject) -> None:
    assert summed(numbers) == summed(data.draw(st.permutations(numbers)))


@given(numbers=st.lists(FLOAT32, min_size=1, max_size=50))
def test_sums_equal_exact_arithmetic(numbers: list[float]) -> None:
    exact = sum(map(Fraction, numbers))
    assert abs(Fraction(summed(numbers)) - exact) <= abs(exact) * Fraction(2) ** -52 + len(numbers) * Fraction(2) ** -66


def test_a_value_that_is_not_finite_or_too_large_makes_only_its_own_sum_nan() -> None:
    sums = ExactSum([torch.zeros(2), torch.zeros(1), torch.zeros(1), torch.zeros(1)])
    sums.add(0, torch.tensor([1.0, 2.0]))
    sums.add(1, torch.tensor([math.inf]))
    sums.add(2, torch.tensor([-LIMIT]))
    whole, infinite, large, missing = sums.values()
    assert whole.tolist() == [1.0, 2.0]
    assert infinite.isnan().all()
    assert large.isnan().all()
    assert missing is None
    sums.clear()
    assert sums.values() == [None] * 4


def test_the_maximum_number_of_largest_values_stays_in_range_and_one_more_is_refused() -> None:
    largest = math.nextafter(LIMIT, 0.0)
    sums = ExactSum([torch.zeros(1)])
    for _ in range(MOST_ADDED):
        sums.add(0, torch.tensor([largest], dtype=torch.float64))
    assert float(sums.values()[0]) == pytest.approx(MOST_ADDED * largest)
    sums.clear()
    for _ in range(MOST_ADDED):
        sums.add(0, torch.tensor([-1e-25], dtype=torch.float64))
    assert float(sums.values()[0]) == pytest.approx(0, abs=1e-15)
    sums.add(0, torch.tensor([1.0]))
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
