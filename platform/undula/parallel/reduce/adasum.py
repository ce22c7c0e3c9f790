"""Adasum, which averages gradients that agree and adds orthogonal ones, layer by layer and two gradients at a time.

Maleki et al. 2020, arXiv:2006.02924, equation 4. The paper and Horovod combine the gradients of ranks, so their result depends on the
number of ranks. Here the gradients of virtual workers are combined in a tree that does not depend on the ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from undula.parallel.collectives import AllRows
from undula.parallel.layout import Layout
from undula.parallel.reduce.accumulator import Accumulator
from undula.plan.plan import MicroBatch
from undula.plan.tree import combined
from undula.state.pieces import as_real


class AdasumAccumulator(Accumulator):
    """Accumulator that combines the gradients of virtual workers by Adasum.

    Each rank needs memory for one gradient of each of its virtual workers, and for one gradient of each rank.

    Args:
        module: Module on its device.
        layout: Layout of the worker group.
        virtual_workers: Number of virtual workers of the plan.
        all_rows: Function that returns the rows of all ranks.
    """

    def __init__(self, module: nn.Module, layout: Layout, virtual_workers: int, all_rows: AllRows):
        super().__init__(module)
        self._all_rows = all_rows
        self._device = layout.device
        self._all = (0, virtual_workers)
        self._own = layout.virtual_workers(virtual_workers)
        self._roots = layout.roots(virtual_workers)
        self._cell = layout.cell
        self._likes = [as_real(parameter) for parameter in self.parameters]
        self._sizes = [like.numel() for like in self._likes]
        self._dtype = torch.float64 if any(like.dtype == torch.float64 for like in self._likes) else torch.float32

    def open(self, work: Sequence[MicroBatch]) -> None:
        self._sums = dict(zip(self._own, self._zeros(len(self._own)), strict=True))
        self._samples = dict.fromkeys(self._own, 0)
        self._has_gradient = torch.zeros(len(self._sizes), device=self._device)

    def before_forward(self) -> None:
        """Free the gradients of the former micro-batch, which has a sum of its own."""
        for parameter in self.parameters:
            parameter.grad = None

    def add(self, micro_batch: MicroBatch) -> None:
        self._samples[micro_batch.virtual_worker] += micro_batch.samples
        parts = torch.split(self._sums[micro_batch.virtual_worker], self._sizes)
        for place, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            if parameter.grad is not None:
                self._has_gradient[place] = 1
                part += as_real(parameter.grad).flatten()

    def finish(self, samples: int) -> None:
        """Combine the gradients of this rank's virtual workers, exchange the results, and combine those of all ranks on every rank."""
        for virtual_worker, count in self._samples.items():
            # Losses are weighted by the samples of the step, but Adasum combines means over each virtual worker's own samples.
            self._sums[virtual_worker] *= samples / max(count, 1)
        leaves = {(virtual_worker, virtual_worker + 1): sums for virtual_worker, sums in self._sums.items()}
        own = torch.stack([combined(root, leaves, self._combine) for root in self._roots[self._cell]])
        self._sums = {}
        del leaves
        every = self._all_rows(own, list(map(len, self._roots)))
        has_gradient = self._all_rows(self._has_gradient[None], [1] * len(self._roots)).sum(0)
        nodes = (node for of_rank in self._roots for node in of_rank)
        result = combined(self._all, dict(zip(nodes, every, strict=True)), self._combine)
        parts = zip(self.parameters, self._likes, torch.split(result, self._sizes), has_gradient.tolist(), strict=True)
        for parameter, like, part, ranks in parts:
            value = torch.view_as_complex(part.view_as(like)) if parameter.is_complex() else part.view_as(like)
            parameter.grad = value.to(parameter.dtype) if ranks else None

    def _zeros(self, rows: int) -> Tensor:
        return torch.zeros(rows, sum(self._sizes), dtype=self._dtype, device=self._device)

    def _combine(self, one: Tensor, other: Tensor) -> Tensor:
        layers = zip(torch.split(one, self._sizes), torch.split(other, self._sizes), strict=True)
        return torch.cat([adasum(left, right) for left, right in layers])


def adasum(one: Tensor, other: Tensor) -> Tensor:
    """Combine two gradients of a layer."""
    dot, one_squared, other_squared = (
        float(torch.dot(left.flatten().double(), right.flatten().double()))
        for left, right in ((one, other), (one, one), (other, other))
    )
    one_part = 1 - dot / (2 * one_squared) if one_squared else 1.0
    other_part = 1 - dot / (2 * other_squared) if other_squared else 1.0
    return one * one_part + other * other_part
