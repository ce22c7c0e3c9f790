"""Adasum: gradients that agree are averaged, those that are orthogonal are added, layer by layer and two at a time.

Maleki et al. 2020, arXiv:2006.02924, equation 4. There, and in Horovod, ranks are combined, so that the result depends on how many there
are. Here virtual workers are, in a tree that knows no ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from undula.parallel.collectives import AllReduce, broadcast_from_rank_0
from undula.parallel.engines.torch_engines import Engine
from undula.plan.plan import MicroBatch

Span = tuple[int, int]
"""First virtual worker, and the one after the last."""


def adasum(one: Tensor, other: Tensor) -> Tensor:
    """Two gradients of a layer in one."""
    dot, one_squared, other_squared = (
        float(torch.dot(left.flatten().double(), right.flatten().double()))
        for left, right in ((one, other), (one, one), (other, other))
    )
    one_part = 1 - dot / (2 * one_squared) if one_squared else 1.0
    other_part = 1 - dot / (2 * other_squared) if other_squared else 1.0
    return one * one_part + other * other_part


def halves(span: Span) -> tuple[Span, Span]:
    """The two spans that one is made of; the first as long as the largest power of two below it."""
    begin, end = span
    middle = begin + 2 ** ((end - begin - 1).bit_length() - 1)
    return (begin, middle), (middle, end)


def largest_within(span: Span, shares: Sequence[range]) -> list[Span]:
    """The largest spans of the tree below `span` that a rank has the whole of, given each rank's virtual workers."""
    begin, end = span
    if any(share.start <= begin and end <= share.stop for share in shares):
        return [span]
    return [found for half in halves(span) for found in largest_within(half, shares)]


class AdasumEngine(Engine):
    """Combines virtual workers' gradients by Adasum. Takes the memory of one gradient for each virtual worker of a rank, and for each rank.

    Args:
        device: of this rank.
        shares: each rank's virtual workers.
        rank: of this process.
        all_reduce: how ranks tell each other what they have.
    """

    def __init__(self, device: torch.device, shares: Sequence[range], rank: int, all_reduce: AllReduce):
        self.device = device
        self._all_reduce = all_reduce
        self._all = (0, shares[-1].stop)
        self._told = largest_within(self._all, shares)
        self._own = shares[rank]
        self._parameters: list[nn.Parameter] = []

    def wrap(self, module: nn.Module) -> nn.Module:
        module = module.to(self.device)
        broadcast_from_rank_0(module)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        return module

    def begin_step(self, micro_batches: int) -> None:
        numbers = sum(self._sizes)
        self._sums = {each: torch.zeros(numbers, device=self.device) for each in self._own}
        self._samples = dict.fromkeys(self._own, 0)

    def before_micro_batch(self, model: nn.Module, is_last: bool) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def after_micro_batch(self, micro_batch: MicroBatch) -> None:
        if not micro_batch.samples:
            return
        self._samples[micro_batch.virtual_worker] += micro_batch.samples
        parts = torch.split(self._sums[micro_batch.virtual_worker], self._sizes)
        for parameter, part in zip(self._parameters, parts, strict=True):
            if parameter.grad is not None:
                part += parameter.grad.flatten()

    def end_step(self, samples: int) -> None:
        """Each rank combines what is its own, tells the others, and combines the rest as they do."""
        found = torch.zeros(len(self._told), sum(self._sizes), device=self.device)
        for virtual_worker, count in self._samples.items():
            self._sums[virtual_worker] *= samples / max(count, 1)  # the mean over its own samples
        for row, span in zip(found, self._told, strict=True):
            if span[0] in self._own:
                row.copy_(self._combined(span, {(each, each + 1): sums for each, sums in self._sums.items()}))
        self._sums = {}
        self._all_reduce(found)
        result = self._combined(self._all, dict(zip(self._told, found, strict=True)))
        for parameter, part in zip(self._parameters, torch.split(result, self._sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)

    def _combined(self, span: Span, known: dict[Span, Tensor]) -> Tensor:
        if span in known:
            return known[span]
        one, other = (torch.split(self._combined(half, known), self._sizes) for half in halves(span))
        return torch.cat([adasum(left, right) for left, right in zip(one, other, strict=True)])
