"""Rules by which the changes of buffers are combined over the virtual workers of a step, each for one kind of buffers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from undula.errors import UsageError
from undula.parallel.collectives import AllReduce
from undula.parallel.reduce.tree import TreeSum
from undula.state.pieces import as_real

STEP_COUNTER = "num_batches_tracked"
"""Name of BatchNorm's buffer, which counts steps."""
VALUES = {
    *("ptr", "pointer", "index", "idx", "position", "cursor", "max"),
    *("maximum", "min", "minimum", "last", "current", "latest"),
}
"""Parts of the names of integer buffers that hold a value and no count, such as the next free place in a queue."""
LARGE = 2**20
"""Number of elements from which an integer buffer is no count, such as the weights of a quantized layer."""
INTEGERS = {
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}


def kind_of(buffer: Tensor) -> tuple[str, bool]:
    """Return what buffers of one group have in common."""
    return str(buffer.dtype), is_constant(buffer)


def is_constant(buffer: Tensor) -> bool:
    """Return whether a forward pass must not change a buffer: it has no arithmetic, or it is too large to be a count."""
    if buffer.dtype in INTEGERS:
        return buffer.numel() > LARGE
    has_arithmetic = buffer.dtype.itemsize > 1 and (buffer.dtype.is_floating_point or buffer.dtype.is_complex)
    return not has_arithmetic and buffer.dtype != torch.bool


class Group(ABC):
    """Buffers of one dtype that are combined by the same rule and processed as one tensor, because a model has many small buffers.

    Args:
        buffers: Buffers by name.
        all_reduce: Function that sums a tensor over the ranks, in place.
    """

    def __init__(self, buffers: Mapping[str, Tensor], all_reduce: AllReduce):
        self._names, self._buffers = list(buffers), list(buffers.values())
        self._all_reduce = all_reduce
        self._sizes = [buffer.numel() for buffer in self._buffers]

    @abstractmethod
    def begin_step(self) -> None: ...

    @abstractmethod
    def end_micro_batch(self, samples: int, virtual_worker: int) -> None: ...

    @abstractmethod
    def end_step(self, step_samples: int) -> None:
        """Set the buffers to their values after the step.

        Raises:
            UsageError: The changes of a buffer cannot be combined. All ranks raise it.
        """

    def values(self) -> Tensor:
        """Return the elements of all buffers; shape [elements]."""
        return torch.cat([buffer.flatten() for buffer in self._buffers])

    def _set(self, values: Tensor) -> None:
        parts = zip(torch.split(values, self._sizes), self._buffers, strict=True)
        torch._foreach_copy_(self._buffers, [part.view_as(buffer) for part, buffer in parts])


class Constants(Group):
    """Buffers that a forward pass must not change, such as the weights of quantized layers. They are only compared."""

    def __init__(self, buffers: Mapping[str, Tensor], all_reduce: AllReduce, begin_of: Callable[[Tensor], Tensor]):
        super().__init__(buffers, all_reduce)
        self._begin_of = begin_of

    def begin_step(self) -> None:
        self._changed = self._buffers[0].new_zeros(len(self._buffers), dtype=torch.int32)

    def end_micro_batch(self, samples: int, virtual_worker: int) -> None:
        for place, buffer in enumerate(self._buffers):
            begin = self._begin_of(buffer).reshape(-1).view(torch.uint8)
            self._changed[place] += (buffer.reshape(-1).view(torch.uint8) != begin).any()

    def end_step(self, step_samples: int) -> None:
        self._all_reduce(self._changed)
        for name, changed in zip(self._names, self._changed.tolist(), strict=True):
            if changed:
                raise UsageError(
                    f"the forward pass changed the buffer {name!r}, which is too large for a count or has a dtype without arithmetic; "
                    "change the buffer after step.update()"
                )


class Means(Group):
    """Floating-point or complex buffers of one dtype, which move by the mean of the changes."""

    def __init__(self, buffers: Mapping[str, Tensor], all_reduce: AllReduce, moved: TreeSum):
        super().__init__({name: as_real(buffer) for name, buffer in buffers.items()}, all_reduce)
        self._moved = moved

    def begin_step(self) -> None:
        self._begin = self.values()
        # A minimum may begin at infinity, from where no change is finite; such an element moves as if it began at 0.
        self._base = self._begin.nan_to_num(0.0, 0.0, 0.0)
        self._moved.begin_step()

    def end_micro_batch(self, samples: int, virtual_worker: int) -> None:
        values = self.values()
        # An element that has not changed must keep its value, even if it is infinite.
        moved = (values - self._base).masked_fill_(values == self._begin, 0)
        self._moved.add(virtual_worker, _at_least_fp32(moved) * samples)

    def end_step(self, step_samples: int) -> None:
        moved = self._moved.total(like=_at_least_fp32(self._begin))
        base = torch.where(moved != 0, self._base, self._begin)
        self._set((base + moved / step_samples).to(self._begin.dtype))


def _at_least_fp32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


class Integers(Group):
    """Integer buffers of one dtype. Their increments are added up, like those of a count.

    A buffer of one element that every micro-batch of the step increases by one counts steps, and so does one with BatchNorm's name.
    """

    def __init__(self, buffers: Mapping[str, Tensor], all_reduce: AllReduce):
        super().__init__(buffers, all_reduce)
        self._counts_steps = self._where(lambda name, buffer: name.endswith(STEP_COUNTER))
        self._may_count_steps = self._where(lambda name, buffer: buffer.numel() == 1)
        self._is_position = self._where(
            lambda name, buffer: not VALUES.isdisjoint(name.rpartition(".")[2].lower().split("_"))
        )
        self._can_fail = not all(name.endswith(STEP_COUNTER) for name in buffers)

    def begin_step(self) -> None:
        self._begin = self.values()
        self._sums = self._begin.new_zeros(4, self._begin.numel())
        self._num_micro_batches = 0

    def end_micro_batch(self, samples: int, virtual_worker: int) -> None:
        moved = self.values() - self._begin
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
        self._set(self._begin + torch.where(counts_steps, moved // movers.clamp(min=1), moved))

    def _refuse(self, is_wrong: Tensor) -> None:
        for name, part in zip(self._names, torch.split(is_wrong.cpu(), self._sizes), strict=True):
            if part.any():
                raise UsageError(
                    f"the forward pass changed the integer buffer {name!r} in a way that cannot be combined over the micro-batches of a "
                    "step: it holds a position or another value, became smaller, or may count steps as well as samples; change the buffer "
                    f"after step.update(), or name a count of steps {STEP_COUNTER}"
                )

    def values(self) -> Tensor:
        return super().values().long()

    def _where(self, condition: Callable[[str, Tensor], bool]) -> Tensor:
        """Return for each element whether its buffer meets a condition."""
        met = [condition(name, buffer) for name, buffer in zip(self._names, self._buffers, strict=True)]
        each = [is_met for is_met, size in zip(met, self._sizes, strict=True) for _ in range(size)]
        return torch.tensor(each, device="cpu").to(self._buffers[0].device)


class Flags(Group):
    """Boolean buffers. A flag changes if any micro-batch changes it, provided that this is always in the same direction."""

    def __init__(self, buffers: Mapping[str, Tensor], all_reduce: AllReduce):
        super().__init__(buffers, all_reduce)
        self._directions: dict[str, set[str]] = {name: set() for name in buffers}
        """Directions in which some micro-batches, but not all of a step, have changed a buffer's flags."""

    def begin_step(self) -> None:
        self._begin = self.values()
        self._changed = torch.zeros_like(self._begin)
        self._kept = torch.zeros_like(self._begin)

    def end_micro_batch(self, samples: int, virtual_worker: int) -> None:
        changed = self.values() ^ self._begin
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
        self._set(self._begin ^ changed)

    def _check(self, changed: Tensor, kept: Tensor) -> None:
        """Raise UsageError if micro-batches that differ have changed flags of a buffer in both directions."""
        kinds = torch.stack([changed & ~self._begin, changed & self._begin, changed & kept])
        by_buffer = [part.any(1) for part in torch.split(kinds, self._sizes, 1)]
        for (name, directions), (on, off, differs) in zip(
            self._directions.items(), torch.stack(by_buffer).tolist(), strict=True
        ):
            if differs:
                directions.update({"on"} if on else (), {"off"} if off else ())
            if len(directions) > 1:
                raise UsageError(
                    f"the forward pass switched flags of the Boolean buffer {name!r} both on and off, which cannot be combined over the "
                    "micro-batches of a step; change the buffer after step.update()"
                )
