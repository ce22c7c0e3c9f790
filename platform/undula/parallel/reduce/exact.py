"""Sums of Python's floating-point numbers that are equal bit for bit in any order of the terms."""

import math
from collections.abc import Sequence

_TOTAL_BITS = 80


def exact_total(values: Sequence[float]) -> tuple[int, float]:
    """Return the sum of some values in a form that can be added to other sums in any order.

    Returns:
        The sum of the finite values as an integer in units of 2^-80, and the sum of the values that are not finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    not_finite = sum(value for value in values if not math.isfinite(value))
    return sum(_integer(value) for value in finite), not_finite


def total_value(total: int, not_finite: float) -> float:
    """Convert a result of `exact_total`, or the sum of several results, to a float."""
    try:
        return float(total / 2**_TOTAL_BITS + not_finite)
    except OverflowError:
        return math.copysign(math.inf, total) + not_finite


def _integer(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return (numerator << _TOTAL_BITS) // denominator
