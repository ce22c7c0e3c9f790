"""Sums of floating-point numbers that are equal bit for bit in any order of the terms, and therefore at any world size.

Each number is rounded once to a multiple of 2^-66 and split into two integers of 50 bits, whose sums are exact. This is the fixed-point
accumulator of Kulisch, "Computer Arithmetic and Validity", 2008, limited to the range of gradients. float32 numbers of at least 2^-42 are
not rounded at all.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.collectives import AllReduce
from undula.parallel.reduce.accumulator import SeparateAccumulator
from undula.plan.plan import MicroBatch
from undula.state.pieces import as_real

_HIGH_BITS, _LOW_BITS = 16, 66
LIMIT = 2.0**34
"""Smallest absolute value that counts as not finite, because sums of such numbers could exceed the range of the integers."""
MOST_ADDED = 2**13 - 1
"""Maximum number of terms in a sum. The sum of that many integers of 50 bits fits into 63 bits."""
_TOTAL_BITS = 80
CHUNK = 2**20
"""Number of elements that are converted at once: enough to occupy a GPU, and few enough for intermediate results to stay in its cache."""


class ExactAccumulator(SeparateAccumulator):
    """Accumulator of deterministic jobs. It sums gradients as integers, so that the order of the terms does not change any bit.

    The sums are reduced at the end of the step, not during the backward pass. They take 16 bytes per parameter, whereas buckets send 4.

    Args:
        module: Module on its device.
        all_reduce: Function that sums a tensor of integers over the ranks, in place.
    """

    def __init__(self, module: nn.Module, all_reduce: AllReduce):
        super().__init__(module)
        self._all_reduce = all_reduce
        self._sums = ExactSum(list(map(as_real, self.parameters)))

    def open(self, micro_batches: int) -> None:
        self._sums.clear()

    def add(self, micro_batch: MicroBatch) -> None:
        self._sums.add(self.gradients())

    def finish(self, samples: int) -> None:
        self._sums.all_reduce(self._all_reduce)
        self.store(self._sums.values())


class ExactSum:
    """Exact sums of real tensors over virtual workers and ranks. They take 16 bytes of memory per element.

    Args:
        like: Tensors that have the shapes and the device of the sums. Each sum can have up to MOST_ADDED terms over all ranks.
    """

    def __init__(self, like: Sequence[Tensor]):
        self._shapes = [tensor.shape for tensor in like]
        self._sizes = [tensor.numel() for tensor in like]
        self._starts = [0, *accumulate(self._sizes)]
        device = like[0].device if like else torch.device("cpu")
        # The integers and two counts per tensor are in one buffer, so that a single all-reduce sums all of them.
        self._sums = torch.zeros(2 * sum(self._sizes) + 2 * len(like), dtype=torch.int64, device=device)
        self._high, self._low, self._counts = torch.split(
            self._sums, [sum(self._sizes), sum(self._sizes), 2 * len(like)]
        )
        self._is_clear = True

    def clear(self) -> None:
        if not self._is_clear:
            self._sums.zero_()
        self._is_clear = True

    def add(self, terms: Sequence[Tensor | None]) -> None:
        """Add a term to each of the sums, in their order; None adds nothing."""
        self._is_clear = False
        flat = [None if term is None else term.detach().flatten() for term in terms]
        self._count(flat)
        for start, parts in self._chunks(flat):
            numbers = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(torch.float64, copy=True)
            stop = start + len(numbers)
            # Scaling by a power of two and subtracting the upper bits of a number are exact in float64.
            high = torch.mul(numbers, 2.0**_HIGH_BITS).floor_()
            low = numbers.sub_(high, alpha=2.0**-_HIGH_BITS).mul_(2.0**_LOW_BITS).round_()
            self._high[start:stop] += high.long()
            self._low[start:stop] += low.long()

    def _count(self, terms: Sequence[Tensor | None]) -> None:
        """Count the terms of each sum, and those that are not finite. Their integers do not matter, because the sum is NaN."""
        full = [term for term in terms if term is not None and len(term)]
        if full:
            largest = iter(torch._foreach_norm(full, math.inf, dtype=torch.float64))
            zero = full[0].new_zeros((), dtype=torch.float64)
            ordered = [zero if term is None or not len(term) else next(largest) for term in terms]
            self._counts[len(terms) :] += ~(torch.stack(ordered) < LIMIT)  # the comparison is false for NaN
        for first, count in _runs([term is not None for term in terms]):
            self._counts[first : first + count] += 1

    def _chunks(self, terms: Sequence[Tensor | None]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield numbers that are neighbours in the sums, with their first place, at most CHUNK at once."""
        first, parts, size = 0, list[Tensor](), 0
        for start, term in zip(self._starts, terms, strict=False):
            for offset, part in enumerate(() if term is None else torch.split(term, CHUNK)):
                place = start + offset * CHUNK
                if size and (place != first + size or size + len(part) > CHUNK):
                    yield first, parts
                    parts, size = [], 0
                first = first if size else place
                parts.append(part)
                size += len(part)
        if size:
            yield first, parts

    def all_reduce(self, all_reduce: AllReduce) -> None:
        """Sum over the ranks, after each rank has added the terms of its virtual workers."""
        self._is_clear = False  # also on a rank without terms, which gets those of the others
        all_reduce(self._sums)

    def values(self) -> list[Tensor | None]:
        """Return the sums as float64: NaN for a sum with a term that was not finite, None for a sum without terms.

        Raises:
            UsageError: A sum has more terms than the integers can hold.
        """
        counts = self._counts.tolist()
        added, not_finite = counts[: len(self._sizes)], counts[len(self._sizes) :]
        if max(added, default=0) > MOST_ADDED:
            raise UsageError(
                f"this step has {max(added)} micro-batches, but deterministic=true can sum at most {MOST_ADDED}; "
                "raise plan.micro_batch or lower plan.virtual_workers"
            )
        whole = torch.empty_like(self._high, dtype=torch.float64)
        for out, high, low in zip(*(torch.split(sums, CHUNK) for sums in (whole, self._high, self._low)), strict=True):
            torch.mul(high.double(), 2.0**-_HIGH_BITS, out=out)
            out.add_(low.double(), alpha=2.0**-_LOW_BITS)
        values = [value.view(shape) for value, shape in zip(torch.split(whole, self._sizes), self._shapes, strict=True)]
        for value, has_failed in zip(values, not_finite, strict=True):
            if has_failed:
                value.fill_(math.nan)
        return [value if terms else None for value, terms in zip(values, added, strict=True)]


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the first place and the length of each run of true flags."""
    place = 0
    for flag, run in groupby(flags):
        length = len(list(run))
        if flag:
            yield place, length
        place += length


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
