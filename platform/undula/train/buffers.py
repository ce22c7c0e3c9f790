"""Buffers that a forward pass changes, such as BatchNorm's running statistics, with a result that does not depend on the ranks.

Every micro-batch starts from the buffers that the step began with. After the step, floating-point and complex buffers have moved by the
mean of the micro-batches' changes, weighted by samples; integers by the sum of the changes, and counters of steps by one; and a Boolean
has changed if any micro-batch has changed it. A forward pass may change a buffer in place or replace it by another tensor. A buffer that
is None when the step begins gets the value of the step's first micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.collectives import AllReduce
from undula.parallel.reduce.exact import ExactSum

STEP_COUNTER = "num_batches_tracked"
"""Name of BatchNorm's buffer, which counts steps."""
VALUES = {
    "ptr",
    "pointer",
    "index",
    "idx",
    "position",
    "cursor",
    "max",
    "maximum",
    "min",
    "minimum",
    "last",
    "current",
    "latest",
}
"""Parts of the names of integer buffers that hold a value and no count, such as the next free place in a queue."""
LARGE = 2**20
"""Number of elements from which an integer buffer is no count, such as the weights of a quantized layer."""
INTEGERS = {
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}


class _Group(Protocol):
    """Buffers that are combined by the same rule and processed as one tensor, because a model has many small buffers."""

    def begin_step(self) -> None: ...

    def end_micro_batch(self, samples: int) -> None: ...

    def end_step(self, step_samples: int) -> None:
        """Set the buffers to their values after the step.

        Raises:
            UsageError: The changes of a buffer cannot be combined. All ranks raise it.
        """


class BufferMean:
    """Combines the changes of a module's buffers over the virtual workers of a step.

    Args:
        module: Module that has the buffers.
        all_reduce: Function that sums a tensor over the ranks, in place.
        is_first: Whether this rank runs the first micro-batch of every step.
        exact: Whether to sum in integers, so that the order of virtual workers and ranks does not change any bit.
    """

    def __init__(self, module: nn.Module, all_reduce: AllReduce, exact: bool = False, is_first: bool = True):
        found = [(path, each, key) for path, each in module.named_modules() for key in each._buffers]
        self._places = [(each._buffers, key) for _, each, key in found]
        self._names = [f"{path}.{key}".removeprefix(".") for path, _, key in found]
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
        """Whether the module has buffers, or may get some."""
        return bool(self._places)

    def begin_step(self) -> None:
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
            UsageError: The changes of a buffer cannot be combined, or the forward pass has set a buffer that was None on some ranks only,
                or to tensors of different sizes.
        """
        self._put_back()
        for group in self._groups:
            group.end_step(step_samples)
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
        by_kind = sorted(named.values(), key=lambda each: _kind(each[1]))
        self._groups = [self._group(dict(group)) for _, group in groupby(by_kind, lambda each: _kind(each[1]))]

    def _group(self, buffers: Mapping[str, Tensor]) -> _Group:
        """Return a group of buffers of one kind."""
        example = next(iter(buffers.values()))
        if example.dtype == torch.bool:
            return _Flags(buffers, self._all_reduce)
        if _is_constant(example):
            places = {id(buffer): place for place, buffer in enumerate(self._buffers)}
            return _Constants(buffers, self._all_reduce, lambda buffer: self._begin[places[id(buffer)]])
        if example.dtype in INTEGERS:
            return _Integers(buffers, self._all_reduce)
        return _Means(list(buffers.values()), self._all_reduce, self._exact)

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
            found = buffers[key]
            if known is not None and found is not None and found is not known:
                if found.shape != known.shape:
                    raise UsageError(
                        f"the forward pass replaced the buffer {name!r} of shape {tuple(known.shape)} by a tensor of shape "
                        f"{tuple(found.shape)}; keep its shape, or hold the tensor in an attribute that is not a buffer"
                    )
                known.copy_(found.detach())
                buffers[key] = known


def _kind(buffer: Tensor) -> tuple[str, bool]:
    return str(buffer.dtype), _is_constant(buffer)


def _is_constant(buffer: Tensor) -> bool:
    """Return whether a forward pass must not change a buffer: it has no arithmetic, or it is too large to be a count."""
    if buffer.dtype in INTEGERS:
        return buffer.numel() > LARGE
    has_arithmetic = buffer.dtype.itemsize > 1 and (buffer.dtype.is_floating_point or buffer.dtype.is_complex)
    return not has_arithmetic and buffer.dtype != torch.bool


class _Constants:
    """Buffers that a forward pass must not change, such as the weights of quantized layers. They are only compared."""

    def __init__(self, buffers: Mapping[str, Tensor], all_reduce: AllReduce, begin_of: Callable[[Tensor], Tensor]):
        self._buffers = buffers
        self._all_reduce = all_reduce
        self._begin_of = begin_of

    def begin_step(self) -> None:
        self._changed = next(iter(self._buffers.values())).new_zeros(len(self._buffers), dtype=torch.int32)

    def end_micro_batch(self, samples: int) -> None:
        for place, buffer in enumerate(self._buffers.values()):
            begin = self._begin_of(buffer).reshape(-1).view(torch.uint8)
            self._changed[place] += (buffer.reshape(-1).view(torch.uint8) != begin).any()

    def end_step(self, step_samples: int) -> None:
        self._all_reduce(self._changed)
        for name, changed in zip(self._buffers, self._changed.tolist(), strict=True):
            if changed:
                raise UsageError(
                    f"the forward pass changed the buffer {name!r}, which is too large for a count or has a dtype without arithmetic; "
                    "change the buffer after step.update()"
                )


class _Means:
    """Floating-point or complex buffers of one dtype, which move by the mean of the changes."""

    def __init__(self, buffers: Sequence[Tensor], all_reduce: AllReduce, exact: bool):
        self._all_reduce = all_reduce
        self._buffers = buffers
        self._reals = [torch.view_as_real(buffer) if buffer.is_complex() else buffer for buffer in buffers]
        self._sizes = [buffer.numel() for buffer in self._reals]
        self._sums = ExactSum(self._reals) if exact else None

    def begin_step(self) -> None:
        self._begin = self._values()
        # A minimum may begin at infinity, from where no change is finite; such an element moves as if it began at 0.
        self._base = self._begin.nan_to_num(0.0, 0.0, 0.0)
        self._moved = torch.zeros_like(self._begin)
        if self._sums:
            self._sums.clear()

    def end_micro_batch(self, samples: int) -> None:
        values = self._values()
        # An element that has not changed must keep its value, even if it is infinite.
        moved = (values - self._base).masked_fill_(values == self._begin, 0)
        if self._sums:
            self._sums.add(torch.split(moved * samples, self._sizes))
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
        base = torch.where(moved != 0, self._base, self._begin)
        ended = (base + moved / step_samples).to(self._begin.dtype)
        parts = torch.split(ended, self._sizes)
        shaped = [part.view_as(buffer) for part, buffer in zip(parts, self._reals, strict=True)]
        torch._foreach_copy_(self._reals, shaped)

    def _values(self) -> Tensor:
        return torch.cat([buffer.flatten() for buffer in self._reals])


class _Integers:
    """Integer buffers of one dtype. Their increments are added up, like those of a count.

    A buffer of one element that every micro-batch of the step increases by one counts steps, and so does one with BatchNorm's name.
    """

    def __init__(self, buffers: Mapping[str, Tensor], all_reduce: AllReduce):
        self._names, self._buffers = list(buffers), list(buffers.values())
        self._all_reduce = all_reduce
        self._sizes = [buffer.numel() for buffer in self._buffers]
        self._counts_steps = self._where(lambda name, buffer: name.endswith(STEP_COUNTER))
        self._may_count_steps = self._where(lambda name, buffer: buffer.numel() == 1)
        self._is_position = self._where(
            lambda name, buffer: not VALUES.isdisjoint(name.rpartition(".")[2].lower().split("_"))
        )
        self._can_fail = not all(name.endswith(STEP_COUNTER) for name in buffers)

    def begin_step(self) -> None:
        self._begin = self._values()
        self._sums = self._begin.new_zeros(4, self._begin.numel())
        self._num_micro_batches = 0

    def end_micro_batch(self, samples: int) -> None:
        moved = self._values() - self._begin
        self._sums += torch.stack([moved, moved != 0, moved == 1, moved < 0])
        self._num_micro_batches += 1

    def end_step(self, step_samples: int) -> None:
        sums = torch.cat([self._sums.flatten(), self._sums.new_full((1,), self._num_micro_batches)])
        self._all_reduce(sums)
        (moved, movers, ones, falls), micro_batches = sums[:-1].view(4, -1), sums[-1]
        if self._can_fail:
            is_wrong = (falls > 0) | (self._is_position & (movers > 0))
            # A count of steps or of samples, which are the same if each micro-batch has one sample.
            is_wrong |= self._may_count_steps & (ones == micro_batches) & (micro_batches == step_samples)
            self._refuse(is_wrong & ~self._counts_steps & (micro_batches > 1))
        counts_steps = self._counts_steps | (self._may_count_steps & (ones == micro_batches))
        ended = self._begin + torch.where(counts_steps, moved // movers.clamp(min=1), moved)
        parts = torch.split(ended, self._sizes)
        torch._foreach_copy_(
            self._buffers, [part.view_as(buffer) for part, buffer in zip(parts, self._buffers, strict=True)]
        )

    def _refuse(self, is_wrong: Tensor) -> None:
        for name, part in zip(self._names, torch.split(is_wrong.cpu(), self._sizes), strict=True):
            if part.any():
                raise UsageError(
                    f"the forward pass changed the integer buffer {name!r} in a way that cannot be combined over the micro-batches of a "
                    "step: it holds a position or another value, became smaller, or may count steps as well as samples; change the buffer "
                    f"after step.update(), or name a count of steps {STEP_COUNTER}"
                )

    def _values(self) -> Tensor:
        return torch.cat([buffer.flatten().long() for buffer in self._buffers])

    def _where(self, condition: Callable[[str, Tensor], bool]) -> Tensor:
        """Return for each element whether its buffer meets a condition."""
        met = [condition(name, buffer) for name, buffer in zip(self._names, self._buffers, strict=True)]
        parts = [
            torch.full((size,), each, device=self._buffers[0].device)
            for size, each in zip(self._sizes, met, strict=True)
        ]
        return torch.cat(parts)


class _Flags:
    """Boolean buffers. A flag changes if any micro-batch changes it, provided that this is always in the same direction."""

    def __init__(self, buffers: Mapping[str, Tensor], all_reduce: AllReduce):
        self._buffers = list(buffers.values())
        self._all_reduce = all_reduce
        self._sizes = [buffer.numel() for buffer in self._buffers]
        self._directions: dict[str, set[str]] = {name: set() for name in buffers}
        """Directions in which some micro-batches, but not all of a step, have changed a buffer's flags."""

    def begin_step(self) -> None:
        self._begin = self._values()
        self._changed = torch.zeros_like(self._begin)
        self._kept = torch.zeros_like(self._begin)

    def end_micro_batch(self, samples: int) -> None:
        changed = self._values() ^ self._begin
        self._changed |= changed
        self._kept |= ~changed

    def end_step(self, step_samples: int) -> None:
        ranks = self._changed.any().int()
        self._all_reduce(ranks)
        if not ranks.item():  # masks are often large and hardly ever change
            return
        sums = torch.stack([self._changed, self._kept]).int()
        self._all_reduce(sums)
        changed, kept = sums > 0
        self._check(changed, kept)
        parts = torch.split(self._begin ^ changed, self._sizes)
        torch._foreach_copy_(
            self._buffers, [part.view_as(buffer) for part, buffer in zip(parts, self._buffers, strict=True)]
        )

    def _check(self, changed: Tensor, kept: Tensor) -> None:
        """Raise UsageError if micro-batches that differ have changed flags of a buffer in both directions."""
        kinds = torch.stack([changed & ~self._begin, changed & self._begin, changed & kept])
        found = [part.any(1) for part in torch.split(kinds, self._sizes, 1)]
        for (name, directions), (on, off, differs) in zip(
            self._directions.items(), torch.stack(found).tolist(), strict=True
        ):
            if differs:
                directions.update({"on"} if on else (), {"off"} if off else ())
            if len(directions) > 1:
                raise UsageError(
                    f"the forward pass switched flags of the Boolean buffer {name!r} both on and off, which cannot be combined over the "
                    "micro-batches of a step; change the buffer after step.update()"
                )

    def _values(self) -> Tensor:
        return torch.cat([buffer.flatten() for buffer in self._buffers])
