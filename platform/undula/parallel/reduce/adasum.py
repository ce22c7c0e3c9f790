"""Adasum, which averages gradients that agree and adds orthogonal ones, layer by layer and two gradients at a time.

Maleki et al. 2020, arXiv:2006.02924, equation 4. The paper and Horovod combine the gradients of ranks, so their result depends on the
number of ranks. Here the gradients of virtual workers are combined in a tree that does not depend on the ranks.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from undula.parallel.collectives import AllReduce
from undula.parallel.layout import Layout
from undula.parallel.reduce.accumulator import SeparateAccumulator
from undula.plan.plan import MicroBatch
from undula.state.pieces import as_real

Interval = tuple[int, int]
"""Consecutive virtual workers: the first one, and the one after the last."""


class AdasumAccumulator(SeparateAccumulator):
    """Accumulator that combines the gradients of virtual workers by Adasum.

    Each rank needs memory for one gradient of each of its virtual workers, and for one gradient of each rank.

    Args:
        module: Module on its device.
        layout: Layout of the worker group.
        virtual_workers: Number of virtual workers of the plan.
        all_reduce: Function that sums a tensor over the ranks, in place.
    """

    def __init__(self, module: nn.Module, layout: Layout, virtual_workers: int, all_reduce: AllReduce):
        super().__init__(module)
        self._all_reduce = all_reduce
        self._device = layout.device
        self._all = (0, virtual_workers)
        self._own = layout.virtual_workers(virtual_workers)
        self._exchanged = largest_within(self._all, layout.assignment(virtual_workers))
        self._likes = [as_real(parameter) for parameter in self.parameters]
        self._sizes = [like.numel() for like in self._likes]
        self._dtype = torch.float64 if any(like.dtype == torch.float64 for like in self._likes) else torch.float32

    def open(self, micro_batches: int) -> None:
        self._sums = dict(zip(self._own, self._zeros(len(self._own)), strict=True))
        self._samples = dict.fromkeys(self._own, 0)
        self._has_gradient = torch.zeros(len(self._sizes), device=self._device)

    def add(self, micro_batch: MicroBatch) -> None:
        self._samples[micro_batch.virtual_worker] += micro_batch.samples
        parts = torch.split(self._sums[micro_batch.virtual_worker], self._sizes)
        for place, (gradient, part) in enumerate(zip(self.gradients(), parts, strict=True)):
            if gradient is not None:
                self._has_gradient[place] = 1
                part += gradient.flatten()

    def finish(self, samples: int) -> None:
        """Combine the gradients of this rank's virtual workers, exchange the results, and combine those of all ranks on every rank."""
        for virtual_worker, count in self._samples.items():
            # Losses are weighted by the samples of the step, but Adasum combines means over each virtual worker's own samples.
            self._sums[virtual_worker] *= samples / max(count, 1)
        leaves = {(virtual_worker, virtual_worker + 1): sums for virtual_worker, sums in self._sums.items()}
        exchanged = self._zeros(len(self._exchanged))
        for row, interval in zip(exchanged, self._exchanged, strict=True):
            if interval[0] in self._own:
                row.copy_(self._combined(interval, leaves))
        self._sums = {}
        del leaves
        self._all_reduce(exchanged)
        self._all_reduce(self._has_gradient)
        result = self._combined(self._all, dict(zip(self._exchanged, exchanged, strict=True)))
        parts = zip(self._likes, torch.split(result, self._sizes), self._has_gradient.tolist(), strict=True)
        self.store(part.view_as(like) if ranks else None for like, part, ranks in parts)

    def _zeros(self, rows: int) -> Tensor:
        return torch.zeros(rows, sum(self._sizes), dtype=self._dtype, device=self._device)

    def _combined(self, interval: Interval, known: Mapping[Interval, Tensor]) -> Tensor:
        """Return the combination of an interval, given those of some intervals of the tree."""
        if interval in known:
            return known[interval]
        one, other = (torch.split(self._combined(half, known), self._sizes) for half in halves(interval))
        return torch.cat([adasum(left, right) for left, right in zip(one, other, strict=True)])


def adasum(one: Tensor, other: Tensor) -> Tensor:
    """Combine two gradients of a layer."""
    dot, one_squared, other_squared = (
        float(torch.dot(left.flatten().double(), right.flatten().double()))
        for left, right in ((one, other), (one, one), (other, other))
    )
    one_part = 1 - dot / (2 * one_squared) if one_squared else 1.0
    other_part = 1 - dot / (2 * other_squared) if other_squared else 1.0
    return one * one_part + other * other_part


def halves(interval: Interval) -> tuple[Interval, Interval]:
    """Split an interval into its two subtrees. The length of the first is the largest power of two below the length of the interval."""
    begin, end = interval
    middle = begin + 2 ** ((end - begin - 1).bit_length() - 1)
    return (begin, middle), (middle, end)


def largest_within(interval: Interval, shares: Sequence[range]) -> list[Interval]:
    """Return the largest subtrees of `interval` that belong to a single rank each, given the virtual workers of each rank."""
    begin, end = interval
    if any(share.start <= begin and end <= share.stop for share in shares):
        return [interval]
    return [subtree for half in halves(interval) for subtree in largest_within(half, shares)]
