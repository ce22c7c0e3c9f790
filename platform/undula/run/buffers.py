"""Buffers that a forward pass changes (BatchNorm's running statistics), defined per virtual worker so that they know no ranks.

Every micro-batch starts from the buffers that the step began with; after the step, floating-point buffers are the mean of what the
micro-batches made of them, weighted by samples, and counters have moved on by one.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class BufferMean:
    """The mean of a module's buffers over the virtual workers of a step."""

    def __init__(self, module: nn.Module):
        self._buffers = [buffer for buffer in module.buffers() if buffer is not None]
        self._begin: list[Tensor] = []
        self._sums: list[Tensor] = []
        self.is_needed = any(torch.is_floating_point(buffer) for buffer in self._buffers)

    def begin_step(self) -> None:
        self._begin = [buffer.clone() for buffer in self._buffers]
        self._sums = [torch.zeros_like(buffer) for buffer in self._buffers]

    def begin_micro_batch(self) -> None:
        for buffer, begin in zip(self._buffers, self._begin, strict=True):
            buffer.copy_(begin)

    def end_micro_batch(self, samples: int) -> None:
        for buffer, total in zip(self._buffers, self._sums, strict=True):
            if torch.is_floating_point(buffer):
                total.add_(buffer, alpha=samples)

    def end_step(self, step_samples: int) -> None:
        for buffer, total in zip(self._buffers, self._sums, strict=True):
            if torch.is_floating_point(buffer):
                if dist.get_world_size() > 1:
                    dist.all_reduce(total)
                buffer.copy_(total.div_(step_samples))
