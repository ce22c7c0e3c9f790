"""Sums of floating-point numbers that come out the same in any order, and so at any world size, bit for bit.

Each number is rounded once to a multiple of 2^-66 and split into two integers of 50 bits, whose sums are exact (the fixed-point
accumulator of Kulisch, "Computer Arithmetic and Validity", 2008, cut to the range that gradients have). float32 numbers of at least
2^-42 are not rounded at all.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from undula.errors import UsageError
from undula.parallel.collectives import AllReduce

_HIGH_BITS, _LOW_BITS = 16, 66
LIMIT = 2.0**34
"""Smallest absolute value that counts as not finite, because sums of such numbers could leave the range of the integers."""
MOST_ADDED = 2**13
"""Largest number of terms of a sum: that many integers of 50 bits stay within 63 bits."""
_TOTAL_BITS = 80


class ExactSum:
    """Sums of real tensors over virtual workers and ranks. Takes 16 bytes of memory for each number.

    Args:
        like: tensors with the shapes of the sums, on their device. Up to MOST_ADDED terms may be added to each over all ranks.
    """

    def __init__(self, like: Sequence[Tensor]):
        self._shapes = [tensor.shape for tensor in like]
        self._sizes = [tensor.numel() for tensor in like]
        device = like[0].device if like else torch.device("cpu")
        # One buffer for all, so that one all-reduce takes them: the integers, and for each shape two counts.
        self._sums = torch.zeros(2 * sum(self._sizes) + 2 * len(like), dtype=torch.int64, device=device)
        high, low, counts = torch.split(self._sums, [sum(self._sizes), sum(self._sizes), 2 * len(like)])
        self._highs, self._lows = list(torch.split(high, self._sizes)), list(torch.split(low, self._sizes))
        self._added, self._not_finite = counts[: len(like)], counts[len(like) :]

    def clear(self) -> None:
        self._sums.zero_()

    def add(self, place: int, values: Tensor) -> None:
        """Add a term to the sum in this place."""
        wide = values.detach().flatten().double()
        is_finite = wide.abs() < LIMIT  # false for NaN
        self._added[place] += 1
        self._not_finite[place] += (~is_finite).any()
        wide = wide.where(is_finite, 0.0)
        # Scaling by powers of two, and what is left of a number below one of its bits, are exact in float64.
        high = torch.floor(wide * 2.0**_HIGH_BITS)
        low = torch.round((wide - high * 2.0**-_HIGH_BITS) * 2.0**_LOW_BITS)
        self._highs[place] += high.long()
        self._lows[place] += low.long()

    def all_reduce(self, all_reduce: AllReduce) -> None:
        """Sum over the ranks, after each has added the terms of its virtual workers."""
        all_reduce(self._sums)

    def values(self) -> list[Tensor | None]:
        """The sums as float64: NaN where a term was not finite, None where there was no term.

        Raises:
            UsageError: more was added than the integers have room for.
        """
        added, not_finite = (counts.tolist() for counts in (self._added, self._not_finite))
        if max(added, default=0) > MOST_ADDED:
            raise UsageError(
                f"this step has {max(added)} micro-batches, and deterministic=true sums at most {MOST_ADDED}: "
                "raise plan.micro_batch, or lower plan.virtual_workers"
            )
        found: list[Tensor | None] = []
        for place, shape in enumerate(self._shapes):
            value = self._highs[place].double() * 2.0**-_HIGH_BITS + self._lows[place].double() * 2.0**-_LOW_BITS
            value = torch.full_like(value, math.nan) if not_finite[place] else value
            found.append(value.view(shape) if added[place] else None)
        return found


def exact_total(values: Sequence[float]) -> tuple[int, float]:
    """A sum that may be added to others in any order: an integer in units of 2^-80, and the sum of the terms that are not finite."""
    finite = [value for value in values if math.isfinite(value)]
    odd = sum(value for value in values if not math.isfinite(value))
    return sum(_integer(value) for value in finite), odd


def total_value(total: int, odd: float) -> float:
    """The float that a sum of results of `exact_total` stands for."""
    try:
        return float(total / 2**_TOTAL_BITS + odd)
    except OverflowError:
        return math.copysign(math.inf, total) + odd


def _integer(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return (numerator << _TOTAL_BITS) // denominator
