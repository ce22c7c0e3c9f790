"""Tests of exact sums: the result does not depend on the grouping of the terms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.train.step_reduction import exact_total, total_value


@given(numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20), cut=st.integers(0, 20))
def test_totals_do_not_depend_on_the_partition(numbers: list[float], cut: int) -> None:
    (one, _), (other, _) = exact_total(numbers[:cut]), exact_total(numbers[cut:])
    assert one + other == exact_total(numbers)[0]
    if sum(map(abs, numbers)) < 1e300:
        assert total_value(one + other, 0.0) == pytest.approx(math.fsum(numbers), rel=1e-15, abs=len(numbers) * 2**-79)
