"""Buffers that a forward pass changes, such as BatchNorm's running statistics, with a result that does not depend on the ranks.

Every micro-batch starts from the buffers that the step began with. After the step, floating-point and complex buffers have moved by the
mean of the micro-batches' changes, weighted by samples; integers by the sum of the changes, and counters of steps by one; and a Boolean
has changed if any micro-batch has changed it. A forward pass may change a buffer in place or replace it by another tensor. A buffer that
is None when the step begins gets the value of the step's first micro-batch.
"""

from collections.abc import Mapping
from functools import partial
from itertools import groupby, islice

import torch
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.collectives import all_reduce_over
from undula.parallel.layout import Layout
from undula.parallel.reduce.tree import TreeSum
from undula.train.buffer_rules import INTEGERS, Constants, Flags, Group, Integers, Means, is_constant, kind_of
from undula.train.step_part import StepPart


class BufferMean(StepPart):
    """Combines the changes of a module's buffers over the virtual workers of a step.

    Args:
        module: Module that has the buffers.
        layout: Layout of the worker group; None for a process without one.
        virtual_workers: Number of virtual workers of the plan.
    """

    def __init__(self, module: nn.Module, layout: Layout | None = None, virtual_workers: int = 1):
        buffers = [(path, layer, key) for path, layer in module.named_modules() for key in layer._buffers]
        self._places = [(layer._buffers, key) for _, layer, key in buffers]
        self._names = [f"{path}.{key}".removeprefix(".") for path, _, key in buffers]
        self._all_reduce = all_reduce_over(layout.shards) if layout else lambda tensor: None
        self._is_first = layout is None or layout.cell == 0
        self._tree_sum = partial(TreeSum, layout, virtual_workers)
        self._device = (
            layout.device
            if layout
            else next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        )
        self._in_places: list[Tensor | None] = []
        self._new: dict[int, Tensor] = {}
        """Values of buffers that were None when the step began, by place."""
        self._counts = [(path, layer, len(layer._buffers)) for path, layer in module.named_modules()]
        self._lay_out()
        self._begin: list[Tensor] = []

    def begin_step(self, index: int, merged_steps: int) -> None:
        if any(buffers[key] is not known for (buffers, key), known in zip(self._places, self._in_places, strict=True)):
            self._lay_out()
        self._begin = [buffer.clone() for buffer in self._buffers]
        self._new = {}
        for group in self._groups:
            group.begin_step()

    def begin_micro_batch(self) -> None:
        self._put_back()
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._begin)

    def end_micro_batch(self, samples: int, virtual_worker: int) -> None:
        """Add the changes of a micro-batch. A rank runs those of one virtual worker after those of another.

        Raises:
            UsageError: The forward pass has registered a persistent buffer.
        """
        for path, layer, count in self._counts:
            for key in islice(layer._buffers, count, None):
                # A buffer that is not persistent is usually a cache, such as a mask, which a resumed run computes again.
                if key not in layer._non_persistent_buffers_set:
                    name = f"{path}.{key}".removeprefix(".")
                    raise UsageError(
                        f"the forward pass registered the buffer {name!r}, which a resumed run would lack; register it when you make "
                        "the model, with None if its value is not known yet"
                    )
        for place, ((buffers, key), known) in enumerate(zip(self._places, self._in_places, strict=True)):
            buffer = buffers[key]
            if known is None and buffer is not None:
                # The other buffers are on the device as well, and NCCL can only sum tensors on GPUs.
                self._new.setdefault(place, buffer.detach().to(self._device, copy=True))
        if samples and self._groups:
            self._take_over()
            for group in self._groups:
                group.end_micro_batch(samples, virtual_worker)

    def end_step(self, samples: int) -> None:
        """Set the buffers to their values after the step.

        Raises:
            UsageError: The changes of a buffer cannot be combined, or the forward pass has set a buffer that was None on some ranks only,
                or to tensors of different sizes.
        """
        self._put_back()
        for group in self._groups:
            group.end_step(samples)
        self._set_new()

    def _lay_out(self) -> None:
        """Find the buffers that the module has now, and group them by dtype."""
        self._in_places = [buffers[key] for buffers, key in self._places]
        named = {
            id(buffer): (name, buffer)
            for name, buffer in zip(self._names, self._in_places, strict=True)
            if buffer is not None
        }
        self._buffers = [buffer for _, buffer in named.values()]
        by_kind = sorted(named.values(), key=lambda pair: kind_of(pair[1]))
        self._groups = [self._group(dict(group)) for _, group in groupby(by_kind, lambda pair: kind_of(pair[1]))]

    def _group(self, buffers: Mapping[str, Tensor]) -> Group:
        """Return a group of buffers of one kind."""
        example = next(iter(buffers.values()))
        if example.dtype == torch.bool:
            return Flags(buffers, self._all_reduce)
        if is_constant(example):
            places = {id(buffer): place for place, buffer in enumerate(self._buffers)}
            return Constants(buffers, self._all_reduce, lambda buffer: self._begin[places[id(buffer)]])
        if example.dtype in INTEGERS:
            return Integers(buffers, self._all_reduce)
        return Means(buffers, self._all_reduce, self._tree_sum())

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
                    f"the forward pass set the buffer {self._names[place]!r}, which was None, on some workers only or to tensors of "
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
        for name, (buffers, key), known in zip(self._names, self._places, self._in_places, strict=True):
            buffer = buffers[key]
            if known is not None and buffer is not None and buffer is not known:
                if buffer.shape != known.shape:
                    raise UsageError(
                        f"the forward pass replaced the buffer {name!r} of shape {tuple(known.shape)} by a tensor of shape "
                        f"{tuple(buffer.shape)}; keep its shape, or hold the tensor in an attribute that is not a buffer"
                    )
                known.copy_(buffer.detach())
                buffers[key] = known
