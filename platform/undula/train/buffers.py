"""Buffers that a forward pass changes, such as BatchNorm's running statistics, with a result that does not depend on the ranks.

Every micro-batch starts from the buffers that the step began with. The step then changes floating-point and complex buffers by the mean
of the micro-batches' changes, weighted by samples, and increases counters by one. A forward pass may change a buffer in place or replace
it by another tensor. A buffer that is None when the step begins gets the value of the step's first micro-batch.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.collectives import AllReduce
from undula.parallel.reduce.exact import ExactSum


class BufferMean:
    """Averages the changes of a module's buffers over the virtual workers of a step.

    Args:
        module: Module that has the buffers.
        all_reduce: Function that sums a tensor over the ranks, in place.
        is_first: Whether this rank runs the first micro-batch of every step.
        exact: Whether to sum in integers, so that the order of virtual workers and ranks does not change any bit.
    """

    def __init__(self, module: nn.Module, all_reduce: AllReduce, exact: bool = False, is_first: bool = True):
        self._places = [(each._buffers, key) for each in module.modules() for key in each._buffers]
        self._all_reduce = all_reduce
        self._is_first = is_first
        self._device = next((each.device for each in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        self._exact = exact
        self._in_places: list[Tensor | None] = []
        self._new: dict[int, Tensor] = {}
        """Values of buffers that were None when the step began, by place."""
        self._lay_out()
        self._begin: list[Tensor] = []

    @property
    def is_needed(self) -> bool:
        """Whether the module has buffers to average, or may get some."""
        return bool(self._groups) or None in self._in_places

    def begin_step(self) -> None:
        if any(buffers[key] is not known for (buffers, key), known in zip(self._places, self._in_places, strict=True)):
            self._lay_out()
        self._begin = [buffer.clone() for buffer in self._buffers]
        self._new = {}
        for group in self._groups:
            group.begin_step()

    def undo_step(self) -> None:
        """Restore the buffers that the unfinished step began with."""
        if self._begin:
            self.begin_micro_batch()

    def keep_step(self) -> None:
        """Keep the buffers of a committed step, so that `undo_step` has no effect until the next step begins."""
        self._begin = []

    def begin_micro_batch(self) -> None:
        self._put_back()
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._begin)

    def end_micro_batch(self, samples: int) -> None:
        for place, ((buffers, key), known) in enumerate(zip(self._places, self._in_places, strict=True)):
            found = buffers[key]
            if known is None and found is not None:
                # The other buffers are on the device as well, and NCCL can only sum tensors on GPUs.
                self._new.setdefault(place, found.detach().to(self._device, copy=True))
        if samples and self._groups:
            self._take_over()
            for group in self._groups:
                group.end_micro_batch(samples)

    def end_step(self, step_samples: int) -> None:
        """Set the buffers to their values after the step.

        Raises:
            UsageError: The forward pass has set a buffer that was None on some ranks only, or to tensors of different sizes.
        """
        self._put_back()
        for group in self._groups:
            group.end_step(step_samples)
        self._set_new()

    def _lay_out(self) -> None:
        """Find the buffers that the module has now, and group them by dtype."""
        self._in_places = [buffers[key] for buffers, key in self._places]
        self._buffers = list({id(buffer): buffer for buffer in self._in_places if buffer is not None}.values())
        moving = [buffer for buffer in self._buffers if buffer.is_floating_point() or buffer.is_complex()]
        by_type = sorted(moving, key=lambda buffer: str(buffer.dtype))
        self._groups = [
            _Group(list(group), self._all_reduce, self._exact) for _, group in groupby(by_type, lambda each: each.dtype)
        ]

    def _put_back(self) -> None:
        """Undo the replacement of buffers by the forward pass: the module gets back the tensors that it had when the step began."""
        for (buffers, key), known in zip(self._places, self._in_places, strict=True):
            if buffers[key] is not known:
                buffers[key] = known

    def _set_new(self) -> None:
        """Set the buffers that were None to the values of the first micro-batch, which all ranks get from the first rank."""
        absent = [place for place, known in enumerate(self._in_places) if known is None]
        if not absent:
            return
        sizes = [self._new[place].nbytes + 1 if place in self._new else 0 for place in absent]
        sums = torch.tensor([1, *sizes], dtype=torch.int64, device=self._device)
        self._all_reduce(sums)
        num_ranks, *totals = sums.tolist()
        for place, size, total in zip(absent, sizes, totals, strict=True):
            if total != num_ranks * size:
                raise UsageError(
                    f"the forward pass set the buffer {self._places[place][1]!r}, which was None, on some workers only or to tensors of "
                    "different sizes; give the buffer a value when you make the model"
                )
        for place, value in self._new.items():
            self._all_reduce_bytes(value)
            buffers, key = self._places[place]
            buffers[key] = value

    def _all_reduce_bytes(self, value: Tensor) -> None:
        """Replace a value by that of the first rank. It is sent as bytes because backends sum only some dtypes."""
        own = value.contiguous().view(-1).view(torch.uint8)
        sent = own if self._is_first else torch.zeros_like(own)
        self._all_reduce(sent)
        value.copy_(sent.view(value.dtype).view(value.shape))

    def _take_over(self) -> None:
        """Copy each tensor that has replaced a buffer into the buffer. A new buffer keeps its tensor until the next micro-batch."""
        for (buffers, key), known in zip(self._places, self._in_places, strict=True):
            found = buffers[key]
            if known is not None and found is not None and found is not known:
                known.copy_(found.detach())
                buffers[key] = known


class _Group:
    """Buffers of one dtype, which are processed as one tensor because a model has many small buffers."""

    def __init__(self, buffers: Sequence[Tensor], all_reduce: AllReduce, exact: bool):
        self._all_reduce = all_reduce
        self._buffers = buffers
        self._reals = [torch.view_as_real(buffer) if buffer.is_complex() else buffer for buffer in buffers]
        self._sizes = [buffer.numel() for buffer in self._reals]
        self._sums = ExactSum(self._reals) if exact else None

    def begin_step(self) -> None:
        self._begin = self._values()
        self._moved = torch.zeros_like(self._begin)
        if self._sums:
            self._sums.clear()

    def end_micro_batch(self, samples: int) -> None:
        values = self._values()
        # An element that has not changed must keep its value, even if it is infinite.
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
        shaped = [part.view_as(buffer) for part, buffer in zip(parts, self._reals, strict=True)]
        torch._foreach_copy_(self._reals, shaped)

    def _values(self) -> Tensor:
        return torch.cat([buffer.flatten() for buffer in self._reals])
