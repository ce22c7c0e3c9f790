"""Engine of Adasum. It combines the gradients of virtual workers in a tree that does not depend on the ranks.

The paper and Horovod combine the gradients of ranks instead, so their result depends on the number of ranks.
"""

import torch
from torch import Tensor

from undula.parallel.capabilities import ADASUM
from undula.parallel.collectives import AllReduce
from undula.parallel.engines.engine import Engine
from undula.parallel.engines.exact import as_real, like_parameter
from undula.parallel.layout import Layout
from undula.parallel.reduce.adasum import Interval, adasum, halves, largest_within
from undula.plan.plan import MicroBatch


class AdasumEngine(Engine):
    """Engine that combines gradients by Adasum.

    Each rank needs memory for one gradient of each of its virtual workers, and for one gradient of each rank.

    Args:
        layout: Layout of the worker group.
        virtual_workers: Number of virtual workers of the plan.
        all_reduce: Function that sums a tensor over the ranks, in place.
    """

    capabilities = ADASUM

    def __init__(self, layout: Layout, virtual_workers: int, all_reduce: AllReduce):
        super().__init__(layout)
        self._all_reduce = all_reduce
        shares = layout.assignment(virtual_workers)
        self._all = (0, virtual_workers)
        self._exchanged = largest_within(self._all, shares)
        self._own = shares[layout.cell]

    def lay_out(self) -> None:
        reals = [as_real(parameter) for parameter in self.trainable]
        self._sizes = [real.numel() for real in reals]
        self._dtype = torch.float64 if any(real.dtype == torch.float64 for real in reals) else torch.float32

    def begin_step(self, micro_batches: int) -> None:
        super().begin_step(micro_batches)
        numbers = sum(self._sizes)
        self._sums = {each: torch.zeros(numbers, dtype=self._dtype, device=self.layout.device) for each in self._own}
        self._samples = dict.fromkeys(self._own, 0)
        self._has_gradient = torch.zeros(len(self._sizes), device=self.layout.device)

    def before_forward(self, is_last: bool) -> None:
        for parameter in self.trainable:
            parameter.grad = None

    def backward(self, loss: Tensor, weight: float, micro_batch: MicroBatch, is_last: bool) -> None:
        super().backward(loss, weight, micro_batch, is_last)
        if not micro_batch.samples:
            return
        self._samples[micro_batch.virtual_worker] += micro_batch.samples
        parts = torch.split(self._sums[micro_batch.virtual_worker], self._sizes)
        for place, (parameter, part) in enumerate(zip(self.trainable, parts, strict=True)):
            if parameter.grad is not None:
                self._has_gradient[place] = 1
                part += as_real(parameter.grad).flatten()

    def reduce_gradients(self, samples: int) -> None:
        """Combine the gradients of this rank's virtual workers, exchange the results, and combine those of all ranks on every rank."""
        found = torch.zeros(len(self._exchanged), sum(self._sizes), dtype=self._dtype, device=self.layout.device)
        for virtual_worker, count in self._samples.items():
            # Losses are weighted by the samples of the step, but Adasum combines means over each virtual worker's own samples.
            self._sums[virtual_worker] *= samples / max(count, 1)
        own = {(each, each + 1): sums for each, sums in self._sums.items()}
        for row, interval in zip(found, self._exchanged, strict=True):
            if interval[0] in self._own:
                row.copy_(self._combined(interval, own))
        self._sums = {}
        self._all_reduce(found)
        self._all_reduce(self._has_gradient)
        result = self._combined(self._all, dict(zip(self._exchanged, found, strict=True)))
        parts = zip(self.trainable, torch.split(result, self._sizes), self._has_gradient.tolist(), strict=True)
        for parameter, part, ranks in parts:
            parameter.grad = like_parameter(part.view_as(as_real(parameter)), parameter) if ranks else None

    def _combined(self, interval: Interval, known: dict[Interval, Tensor]) -> Tensor:
        if interval in known:
            return known[interval]
        one, other = (torch.split(self._combined(half, known), self._sizes) for half in halves(interval))
        return torch.cat([adasum(left, right) for left, right in zip(one, other, strict=True)])
