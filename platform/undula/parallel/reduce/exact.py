"""Sums of floating-point numbers that are equal bit for bit in any order of the terms, and therefore at any world size.

Each number is rounded once to a multiple of 2^-66 and split into two integers of 50 bits, whose sums are exact. This is the fixed-point
accumulator of Kulisch, "Computer Arithmetic and Validity", 2008, limited to the range of gradients. float32 numbers of at least 2^-42 are
not rounded at all.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from undula.errors import UsageError
from undula.parallel.collectives import AllReduce

_HIGH_BITS, _LOW_BITS = 16, 66
LIMIT = 2.0**34
"""Smallest absolute value that counts as not finite, because sums of such numbers could exceed the range of the integers."""
MOST_ADDED = 2**13 - 1
"""Maximum number of terms in a sum. The sum of that many integers of 50 bits fits into 63 bits."""
_TOTAL_BITS = 80


class ExactSum:
    """Exact sums of real tensors over virtual workers and ranks. They take 16 bytes of memory per element.

    Args:
        like: Tensors that have the shapes and the device of the sums. Each sum can have up to MOST_ADDED terms over all ranks.
    """

    def __init__(self, like: Sequence[Tensor]):
        self._shapes = [tensor.shape for tensor in like]
        self._sizes = [tensor.numel() for tensor in like]
        device = like[0].device if like else torch.device("cpu")
        # The integers and two counts per tensor are in one buffer, so that a single all-reduce sums all of them.
        self._sums = torch.zeros(2 * sum(self._sizes) + 2 * len(like), dtype=torch.int64, device=device)
        high, low, counts = torch.split(self._sums, [sum(self._sizes), sum(self._sizes), 2 * len(like)])
        self._highs, self._lows = list(torch.split(high, self._sizes)), list(torch.split(low, self._sizes))
        self._added, self._not_finite = counts[: len(like)], counts[len(like) :]

    def clear(self) -> None:
        self._sums.zero_()

    def add(self, place: int, values: Tensor) -> None:
        """Add a term to sum number `place`."""
        wide = values.detach().flatten().double()
        is_finite = wide.abs() < LIMIT  # false for NaN
        self._added[place] += 1
        self._not_finite[place] += (~is_finite).any()
        wide = wide.where(is_finite, 0.0)
        # Scaling by a power of two and subtracting the upper bits of a number are exact in float64.
        high = torch.floor(wide * 2.0**_HIGH_BITS)
        low = torch.round((wide - high * 2.0**-_HIGH_BITS) * 2.0**_LOW_BITS)
        self._highs[place] += high.long()
        self._lows[place] += low.long()

    def all_reduce(self, all_reduce: AllReduce) -> None:
        """Sum over the ranks, after each rank has added the terms of its virtual workers."""
        all_reduce(self._sums)

    def values(self) -> list[Tensor | None]:
        """Return the sums as float64: NaN for a sum with a term that was not finite, None for a sum without terms.

        Raises:
            UsageError: A sum has more terms than the integers can hold.
        """
        added, not_finite = (counts.tolist() for counts in (self._added, self._not_finite))
        if max(added, default=0) > MOST_ADDED:
            raise UsageError(
                f"this step has {max(added)} micro-batches, but deterministic=true can sum at most {MOST_ADDED}; "
                "raise plan.micro_batch or lower plan.virtual_workers"
            )
        found: list[Tensor | None] = []
        for place, shape in enumerate(self._shapes):
            value = self._highs[place].double() * 2.0**-_HIGH_BITS + self._lows[place].double() * 2.0**-_LOW_BITS
            value = torch.full_like(value, math.nan) if not_finite[place] else value
            found.append(value.view(shape) if added[place] else None)
        return found


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
