"""Buffers that a forward pass changes, as BatchNorm's running statistics, defined per virtual worker so that ranks do not matter.

Every micro-batch starts from the buffers that the step began with. After the step, floating-point buffers have moved by the mean of
the micro-batches' changes, weighted by samples, and counters have moved on by one.
"""

from itertools import groupby

import torch
from torch import Tensor, nn

from undula.parallel.collectives import AllReduce
from undula.parallel.reduce.exact import ExactSum


class BufferMean:
    """The mean of a module's buffers over the virtual workers of a step.

    Args:
        module: has the buffers.
        all_reduce: sums over the ranks.
        exact: whether to sum in integers, so that no order of virtual workers and ranks changes a bit.
    """

    def __init__(self, module: nn.Module, all_reduce: AllReduce, exact: bool = False):
        self._buffers = list(module.buffers())
        by_type = sorted(filter(torch.is_floating_point, self._buffers), key=lambda buffer: str(buffer.dtype))
        self._groups = [
            _Group(list(group), all_reduce, exact) for _, group in groupby(by_type, lambda buffer: buffer.dtype)
        ]
        self._begin: list[Tensor] = []
        self.is_needed = bool(self._groups)

    def begin_step(self) -> None:
        self._begin = [buffer.clone() for buffer in self._buffers]
        for group in self._groups:
            group.begin_step()

    def undo_step(self) -> None:
        """Go back to the buffers that the unfinished step began with."""
        if self._begin:
            self.begin_micro_batch()

    def keep_step(self) -> None:
        """The step is committed: there is nothing to undo until the next one begins."""
        self._begin = []

    def begin_micro_batch(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._begin)

    def end_micro_batch(self, samples: int) -> None:
        if samples:
            for group in self._groups:
                group.end_micro_batch(samples)

    def end_step(self, step_samples: int) -> None:
        for group in self._groups:
            group.end_step(step_samples)


class _Group:
    """Buffers of one type, computed with as one tensor because a model has many small ones."""

    def __init__(self, buffers: list[Tensor], all_reduce: AllReduce, exact: bool):
        self._all_reduce = all_reduce
        self._buffers = buffers
        self._sizes = [buffer.numel() for buffer in buffers]
        self._sums = ExactSum(buffers) if exact else None

    def begin_step(self) -> None:
        self._begin = self._values()
        self._moved = torch.zeros_like(self._begin)
        if self._sums:
            self._sums.clear()

    def end_micro_batch(self, samples: int) -> None:
        values = self._values()
        # A constant buffer stays exactly what it is, infinities included.
        moved = (values - self._begin).masked_fill_(values == self._begin, 0)
        if self._sums:
            for place, part in enumerate(torch.split(moved * samples, self._sizes)):
                self._sums.add(place, part)
        else:
            self._moved.add_(moved, alpha=samples)

    def end_step(self, step_samples: int) -> None:
        if self._sums:
            self._sums.all_reduce(self._all_reduce)
            sums = [value.flatten() for value in self._sums.values() if value is not None]
            moved = torch.cat(sums) if sums else self._moved
        else:
            moved = self._moved
            self._all_reduce(moved)
        ended = (self._begin + moved / step_samples).to(self._begin.dtype)
        parts = torch.split(ended, self._sizes)
        shaped = [part.view_as(buffer) for part, buffer in zip(parts, self._buffers, strict=True)]
        torch._foreach_copy_(self._buffers, shaped)

    def _values(self) -> Tensor:
        return torch.cat([buffer.flatten() for buffer in self._buffers])
