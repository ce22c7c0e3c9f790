"""Buffers that a forward pass changes (BatchNorm's running statistics), defined per virtual worker so that they know no ranks.

Every micro-batch starts from the buffers that the step began with; after the step, floating-point buffers have moved by the mean of
what the micro-batches moved them by, weighted by samples, and counters have moved on by one.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.run.exact import ExactSum


class BufferMean:
    """The mean of a module's buffers over the virtual workers of a step.

    Args:
        module: whose buffers.
        exact: sum in integers, so that no order of virtual workers and ranks changes a bit.
    """

    def __init__(self, module: nn.Module, exact: bool = False):
        self._buffers = list(module.buffers())
        self._begin: list[Tensor] = []
        self._moved: list[Tensor] = []
        self._sums = ExactSum(self._buffers) if exact else None
        self.is_needed = any(torch.is_floating_point(buffer) for buffer in self._buffers)

    def begin_step(self) -> None:
        self._begin = [buffer.clone() for buffer in self._buffers]
        self._moved = [torch.zeros_like(buffer) for buffer in self._buffers]
        if self._sums:
            self._sums.clear()

    def undo_step(self) -> None:
        """Back to the buffers that the unfinished step began with."""
        for buffer, begin in zip(self._buffers, self._begin, strict=False):
            buffer.copy_(begin)

    def keep_step(self) -> None:
        """The step is committed: there is nothing to undo until the next one begins."""
        self._begin = []

    def begin_micro_batch(self) -> None:
        for buffer, begin in zip(self._buffers, self._begin, strict=True):
            buffer.copy_(begin)

    def end_micro_batch(self, samples: int) -> None:
        if not samples:
            return
        for place, (buffer, begin) in enumerate(zip(self._buffers, self._begin, strict=True)):
            if torch.is_floating_point(buffer):
                # A constant buffer stays exactly what it is, infinities included.
                moved = (buffer - begin).masked_fill_(buffer == begin, 0)
                if self._sums:
                    self._sums.add(place, moved * samples)
                else:
                    self._moved[place].add_(moved, alpha=samples)

    def end_step(self, step_samples: int) -> None:
        if self._sums:
            self._end_exactly(self._sums, step_samples)
        else:
            self._end_in_floats(step_samples)

    def _end_exactly(self, sums: ExactSum, step_samples: int) -> None:
        sums.all_reduce()
        for buffer, begin, moved in zip(self._buffers, self._begin, sums.values(), strict=True):
            if moved is not None:
                buffer.copy_(begin + moved / step_samples)

    def _end_in_floats(self, step_samples: int) -> None:
        for dtype in {buffer.dtype for buffer in self._buffers if torch.is_floating_point(buffer)}:
            places = [place for place, buffer in enumerate(self._buffers) if buffer.dtype == dtype]
            moved = torch.cat([self._moved[place].flatten() for place in places])
            if dist.get_world_size() > 1:
                dist.all_reduce(moved)
            moved.div_(step_samples)
            begin = 0
            for place in places:
                buffer = self._buffers[place]
                buffer.copy_(self._begin[place] + moved[begin : begin + buffer.numel()].view_as(buffer))
                begin += buffer.numel()
