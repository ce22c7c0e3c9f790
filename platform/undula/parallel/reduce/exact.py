"""Sums of floating-point numbers that come out the same in any order, and so at any world size, bit for bit.

Each number is rounded once to a multiple of 2^-66 and split into two integers of 50 bits, whose sums are exact (the fixed-point
accumulator of Kulisch, "Computer Arithmetic and Validity", 2008, cut to the range that gradients have). float32 numbers of at least
2^-42 are not rounded at all.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from undula.parallel.collectives import AllReduce, sum_over_ranks

_HIGH_BITS, _LOW_BITS = 16, 66
LIMIT = 2.0**34
"""Numbers of this size and above count as not finite: their sums could leave the integers' range."""
MOST_ADDED = 2**13
"""As many integers of 50 bits stay within 63."""
_TOTAL_BITS = 80


class ExactSum:
    """Sums of tensors of some shapes over virtual workers and ranks. Takes 16 bytes a number.

    Args:
        like: tensors of the shapes, on the device; up to MOST_ADDED of each shape may be added over all ranks.
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
        """Add a tensor to the sum of its shape."""
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

    def all_reduce(self, all_reduce: AllReduce = sum_over_ranks) -> None:
        """Sum over the ranks; every rank has added what its virtual workers had."""
        all_reduce(self._sums)

    def values(self) -> list[Tensor | None]:
        """The sums as float64, by shape; NaN where something was not finite, None where nothing was added.

        Raises:
            RuntimeError: more was added than can be.
        """
        added, not_finite = (counts.tolist() for counts in (self._added, self._not_finite))
        if max(added, default=0) > MOST_ADDED:
            raise RuntimeError(
                f"deterministic: true sums at most {MOST_ADDED} micro-batches a step, and this one has {max(added)}"
            )
        found: list[Tensor | None] = []
        for place, shape in enumerate(self._shapes):
            value = self._highs[place].double() * 2.0**-_HIGH_BITS + self._lows[place].double() * 2.0**-_LOW_BITS
            value = torch.full_like(value, math.nan) if not_finite[place] else value
            found.append(value.view(shape) if added[place] else None)
        return found


def exact_total(values: Sequence[float]) -> tuple[int, float]:
    """A sum that may be added to others in any order: an integer that counts 2^-80, and the sum of what is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    odd = sum(value for value in values if not math.isfinite(value))
    return sum(_integer(value) for value in finite), odd


def total_value(total: int, odd: float) -> float:
    """What a sum of `exact_total`s is, as a float."""
    try:
        return float(total / 2**_TOTAL_BITS + odd)
    except OverflowError:
        return math.copysign(math.inf, total) + odd


def _integer(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return (numerator << _TOTAL_BITS) // denominator
