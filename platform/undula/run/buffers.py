"""Buffers that a forward pass changes (BatchNorm's running statistics), defined per virtual worker so that they know no ranks.

Every micro-batch starts from the buffers that the step began with; after the step, floating-point buffers have moved by the mean of
what the micro-batches moved them by, weighted by samples, and counters have moved on by one.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class BufferMean:
    """The mean of a module's buffers over the virtual workers of a step."""

    def __init__(self, module: nn.Module):
        self._buffers = list(module.buffers())
        self._begin: list[Tensor] = []
        self._moved: list[Tensor] = []
        self.is_needed = any(torch.is_floating_point(buffer) for buffer in self._buffers)

    def begin_step(self) -> None:
        self._begin = [buffer.clone() for buffer in self._buffers]
        self._moved = [torch.zeros_like(buffer) for buffer in self._buffers]

    def begin_micro_batch(self) -> None:
        for buffer, begin in zip(self._buffers, self._begin, strict=True):
            buffer.copy_(begin)

    def end_micro_batch(self, samples: int) -> None:
        if not samples:
            return
        for buffer, begin, moved in zip(self._buffers, self._begin, self._moved, strict=True):
            if torch.is_floating_point(buffer):
                # A constant buffer stays exactly what it is, infinities included.
                moved.add_((buffer - begin).masked_fill_(buffer == begin, 0), alpha=samples)

    def end_step(self, step_samples: int) -> None:
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
