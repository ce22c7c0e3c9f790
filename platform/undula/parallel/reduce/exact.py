"""Sums of Python's floating-point numbers that are equal bit for bit in any order of the terms."""

import math
from collections.abc import Iterable

TOTAL_BITS = 1074
"""Number of binary places of a total: all that a float64 can have."""


def exact_total(values: Iterable[float], weights: Iterable[float] | None = None) -> tuple[int, float]:
    """Return the sum of some values in a form that can be added to other sums in any order.

    Args:
        values: Terms of the sum.
        weights: Factor of each term; by default 1. A product of a term and a factor that is no integer may be cut off after TOTAL_BITS.

    Returns:
        The sum of the finite values as an integer in units of 2^-TOTAL_BITS, and the sum of the values that are not finite.
    """
    total, not_finite = 0, 0.0
    for value, weight in zip(values, weights, strict=True) if weights is not None else ((each, 1) for each in values):
        if math.isfinite(value) and math.isfinite(weight):
            (numerator, denominator), (factor, divisor) = value.as_integer_ratio(), weight.as_integer_ratio()
            total += (numerator * factor << TOTAL_BITS) // (denominator * divisor)
        else:
            not_finite += value * weight
    return total, not_finite


def total_value(total: int, not_finite: float) -> float:
    """Convert a result of `exact_total`, or the sum of several results, to a float."""
    try:
        return float(total / 2**TOTAL_BITS + not_finite)
    except OverflowError:
        return math.copysign(math.inf, total) + not_finite
