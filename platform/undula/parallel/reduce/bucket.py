"""Buckets: gradients of several parameters in one contiguous tensor, and their sums along the tree over the virtual workers."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from undula.plan.tree import Fold

FIRST_BUCKET_BYTES = 2**20
"""Maximum size of the first bucket in bytes. It is small so that communication starts early."""
BUCKET_BYTES = 25 * 2**20
"""Maximum size of all other buckets in bytes."""
ALIGNMENT = 64
"""Bytes at whose multiples views and slices begin. Kernels may add unaligned numbers in another order."""


class Buffer:
    """Memory for one gradient of each parameter of a bucket.

    Args:
        bucket: The bucket.
        dtype: Dtype of the numbers, which are real.
    """

    def __init__(self, bucket: "Bucket", dtype: torch.dtype):
        self._bucket = bucket
        self.flat = torch.zeros(bucket.numel, dtype=dtype, device=bucket.parameters[0].device)
        """Gradients, one count per parameter, and zeros as padding; shape [numel]."""

    @cached_property
    def views(self) -> list[Tensor]:
        """Views of `flat` as gradients of the parameters, in their shapes, strides and dtypes."""
        pieces = torch.split(self.flat[: sum(self._bucket.sizes)], self._bucket.sizes)
        return [
            _shaped_like(parameter, piece) for parameter, piece in zip(self._bucket.parameters, pieces, strict=True)
        ]

    @cached_property
    def counts(self) -> Tensor:
        """View of `flat` with the number of virtual workers that have a gradient of each parameter; shape [parameters]."""
        start = sum(self._bucket.sizes)
        return self.flat[start : start + len(self._bucket.parameters)]


class Bucket:
    """Gradients of some parameters of one dtype and device.

    The gradient of a virtual worker, a *leaf*, accumulates in a buffer. A leaf that is closed is added to the others along the tree.
    Buffers keep their memory between steps.

    Args:
        parameters: Parameters of the bucket.
        virtual_workers: Number of virtual workers of the plan.
        num_slices: Number of aligned slices of equal length into which buffers can be cut.
        sent_as: Dtype to which each sum is rounded; None for their own dtype.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], virtual_workers: int, num_slices: int, sent_as: torch.dtype | None
    ):
        self.parameters = parameters
        self._virtual_workers = virtual_workers
        self._dtype = parameters[0].dtype.to_real()
        self._sent_as = sent_as or self._dtype
        unit = ALIGNMENT // min(self._dtype.itemsize, self._sent_as.itemsize)
        self.sizes = [_rounded_up(each.numel() * (1 + each.is_complex()), unit) for each in parameters]
        """Number of real numbers that each gradient takes, with its padding."""
        self.numel = _rounded_up(sum(self.sizes) + len(parameters), unit * num_slices)
        self._free: list[Buffer] = []
        self._leaf: Buffer | None = None
        self._result: Buffer | None = None
        self._fold = Fold[Buffer | None](virtual_workers, self._add)
        self.ready: set[int] = set()
        """Places of the parameters whose gradients the last backward pass has added to."""
        self.begin_step()

    def begin_step(self) -> None:
        """Take back the gradients of the former step, which may not have been finished."""
        former = (*self._fold.roots.values(), self._result)
        self._free += [buffer for buffer in former if buffer is not None and buffer is not self._leaf]
        self._fold = Fold[Buffer | None](self._virtual_workers, self._add)
        self._result = None
        self._present: set[int] = set()
        self.ready = set()

    @property
    def is_complete(self) -> bool:
        return len(self.ready) == len(self.parameters)

    def accumulated(self, place: int) -> None:
        """Move the gradient that a backward pass has left in the parameter at `place` to the open leaf, unless it is there already."""
        parameter, view = self.parameters[place], self._open_leaf().views[place]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view

    def close_leaf(self, virtual_worker: int, is_last: bool) -> None:
        """Take over the gradient of a virtual worker from the parameters.

        The parameters have no gradient afterwards, unless it is the last one of this rank in the step: then they keep it, so that a change
        by the script is noticed, although it no longer counts.
        """
        leaf = self._open_leaf()
        has = [parameter.grad is not None for parameter in self.parameters]
        for parameter, view in zip(self.parameters, leaf.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                if parameter.grad is not view:  # set by a hook of a library, not by a backward pass
                    view.copy_(parameter.grad)
                parameter.grad = view if is_last else None
        if all(has):
            leaf.counts.fill_(1)
        else:
            leaf.counts.copy_(torch.tensor(has, device="cpu"))
        self._present |= {place for place, is_present in enumerate(has) if is_present}
        if self._sent_as != self._dtype:
            rounded = self._buffer(self._sent_as)
            rounded.flat.copy_(leaf.flat)
            self._fold.push(virtual_worker, rounded)
        else:
            self._leaf = None
            self._fold.push(virtual_worker, leaf)

    def skip_leaf(self, virtual_worker: int) -> None:
        """Close the leaf of a virtual worker that has no samples in the step. It counts as zero."""
        self._fold.push(virtual_worker, None)

    def roots(self) -> list[Tensor]:
        """Return the sums of this rank's subtrees, each of shape [numel]; zeros for a subtree without a leaf."""
        for node, buffer in self._fold.roots.items():
            if buffer is None:
                self._fold.roots[node] = empty = self._buffer(self._sent_as)
                empty.flat.zero_()
        return [buffer.flat for buffer in self._fold.roots.values() if buffer is not None]

    def store(self, is_shared: bool) -> None:
        """Set the gradients of the parameters to the sum of the step, which is in the memory of this rank's first root.

        Args:
            is_shared: Whether it includes the sums of other ranks, which may have gradients of other parameters.
        """
        first, *others = self._fold.roots.values()
        self._fold.roots = {}
        self._free += [buffer for buffer in others if buffer is not None]
        if first is None:
            return
        # Now the sign of a zero does not depend on which virtual workers had no gradient.
        first.flat.add_(0.0)
        if self._sent_as != self._dtype:
            self._free.append(first)
            self._result = self._open_leaf()
            self._result.flat.copy_(first.flat)
        else:
            self._result = first
        # Reading the counts waits for the device, so only a rank that lacks gradients checks whether other ranks have them.
        if is_shared and len(self._present) < len(self.parameters):
            self._present = {place for place, count in enumerate(self._result.counts.tolist()) if count}
        for place in self._present:
            self.parameters[place].grad = self._result.views[place]

    def _open_leaf(self) -> Buffer:
        if self._leaf is None:
            self._leaf = self._buffer(self._dtype)
        return self._leaf

    def _buffer(self, dtype: torch.dtype) -> Buffer:
        for place, buffer in enumerate(self._free):
            if buffer.flat.dtype == dtype:
                return self._free.pop(place)
        return Buffer(self, dtype)

    def _add(self, left: Buffer | None, right: Buffer | None) -> Buffer | None:
        if left is None or right is None:
            return left or right
        left.flat.add_(right.flat)
        self._free.append(right)
        return left


def divide(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters among buckets in reverse order, in which they get their gradients.

    A bucket of several parameters has at most BUCKET_BYTES.
    """
    divided: list[list[nn.Parameter]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        bucket, size = open_buckets.get(kind, ([], 0))
        limit = FIRST_BUCKET_BYTES if bucket and divided[0] is bucket else BUCKET_BYTES
        if not bucket or size + parameter.nbytes > limit:
            bucket, size = [], 0
            divided.append(bucket)
        bucket.append(parameter)
        open_buckets[kind] = (bucket, size + parameter.nbytes)
    return divided


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _shaped_like(parameter: nn.Parameter, piece: Tensor) -> Tensor:
    """Return a view of `piece` with the shape of the parameter, and with its strides if it has no gaps.

    Optimizers process all parameters at once only if gradients have the strides of their parameters, and kernels depend on strides.
    """
    numbers = piece[: parameter.numel() * (1 + parameter.is_complex())]
    if parameter.is_complex():
        numbers = torch.view_as_complex(numbers.view(-1, 2))
    return (
        numbers.as_strided(parameter.size(), parameter.stride())
        if _is_dense(parameter)
        else numbers.view(parameter.size())
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are contiguous in memory, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
