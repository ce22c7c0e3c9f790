"""Buckets: gradients of several parameters in one contiguous tensor, and their sums along the tree over the virtual workers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from undula.plan.tree import Fold, Node

FIRST_BUCKET_BYTES = 2**20
"""Maximum size of the first bucket in bytes. It is small so that communication starts early."""
BUCKET_BYTES = 25 * 2**20
"""Maximum size of all other buckets in bytes."""
ALIGNMENT = 64
"""Bytes at whose multiples views and slices begin. Kernels may add unaligned numbers in another order."""


Gradients = list[Tensor | None]
"""Gradient of each parameter of a bucket, as real numbers; None for a parameter without one."""


class Buffer:
    """Memory for one gradient of each parameter of a bucket.

    Args:
        parameters: Parameters of the bucket.
        sizes: Number of real numbers that each gradient takes, with its padding.
        numel: Number of all numbers, which includes one for each parameter that says whether it has a gradient, and padding.
        dtype: Dtype of the numbers, which are real.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sizes: list[int], numel: int, dtype: torch.dtype):
        self.flat = torch.zeros(numel, dtype=dtype, device=parameters[0].device)
        """All numbers; shape [numel]."""
        pieces = torch.split(self.flat[: sum(sizes)], sizes)
        self.reals = list(map(_shaped_like, parameters, pieces))
        """Views of `flat` as gradients of the parameters, in their shapes and strides; those of complex parameters have an axis more."""
        self.presence = self.flat[sum(sizes) : sum(sizes) + len(parameters)]
        """View of `flat` with a number for each parameter, which is 0 if it has no gradient; shape [parameters]."""


class Bucket:
    """Gradients of some parameters of one dtype and device.

    The gradient of a virtual worker, a *leaf*, accumulates in the parameters. A leaf that is closed is added to the others along the tree.
    The first leaf of a root is copied to a buffer, to which the others are added. Buffers keep their memory between steps.

    Args:
        parameters: Parameters of the bucket.
        virtual_workers: Number of virtual workers of the plan.
        roots: Roots of this rank.
        num_slices: Number of aligned slices of equal length into which buffers can be cut.
        sent_as: Dtype to which each sum is rounded; None for their own dtype.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        virtual_workers: int,
        roots: Sequence[Node],
        num_slices: int,
        sent_as: torch.dtype | None,
    ):
        self.parameters = parameters
        self._virtual_workers = virtual_workers
        dtype = parameters[0].dtype.to_real()
        self._sent_as = sent_as or dtype
        unit = ALIGNMENT // min(dtype.itemsize, self._sent_as.itemsize)
        sizes = [_rounded_up(each.numel() * (1 + each.is_complex()), unit) for each in parameters]
        make_buffer = partial(Buffer, parameters, sizes, _rounded_up(sum(sizes) + len(parameters), unit * num_slices))
        self._roots = {begin: make_buffer(self._sent_as) for begin, _ in roots}
        """Buffer of each root of this rank, by its first virtual worker."""
        self._result = next(iter(self._roots.values())) if self._sent_as == dtype else make_buffer(dtype)
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step. The former one may not have been finished."""
        self._fold = Fold[Gradients](self._virtual_workers, _add)
        self._present: set[int] = set()
        self.ready: set[int] = set()
        """Places of the parameters whose gradients the last backward pass has added to."""

    @property
    def is_complete(self) -> bool:
        return len(self.ready) == len(self.parameters)

    def close_leaf(self, virtual_worker: int, is_last: bool) -> None:
        """Take over the gradient of a virtual worker from the parameters.

        The parameters have no gradient afterwards, unless it is the last one of this rank in the step: then they keep it, so that a change
        by the script is noticed, although it no longer counts.
        """
        leaf = [None if parameter.grad is None else _real(parameter.grad.detach()) for parameter in self.parameters]
        self._present |= {place for place, gradient in enumerate(leaf) if gradient is not None}
        self._push(virtual_worker, leaf)
        if not is_last:
            for parameter in self.parameters:
                parameter.grad = None

    def skip_leaf(self, virtual_worker: int) -> None:
        """Close the leaf of a virtual worker that has no samples in the step. It counts as zero."""
        self._push(virtual_worker, [None] * len(self.parameters))

    def _push(self, virtual_worker: int, leaf: Gradients) -> None:
        if root := self._roots.get(virtual_worker):
            for view, gradient in zip(root.reals, leaf, strict=True):
                if gradient is None:
                    view.zero_()
            _each(torch._foreach_copy_, root.reals, leaf)
            leaf = [*root.reals]
        elif self._sent_as != self._result.flat.dtype:
            leaf = [None if gradient is None else gradient.to(self._sent_as) for gradient in leaf]
        self._fold.push(virtual_worker, leaf)

    def roots(self) -> list[Tensor]:
        """Return the sums of this rank's subtrees, each of shape [numel]."""
        for root in self._roots.values():
            root.presence.fill_(1)
            for place in set(range(len(self.parameters))) - self._present:
                root.presence[place] = 0
        return [root.flat for root in self._roots.values()]

    def store(self, is_shared: bool) -> None:
        """Set the gradients of the parameters to the sum of the step, which is in the memory of this rank's first root.

        Args:
            is_shared: Whether it includes the sums of other ranks, which may have gradients of other parameters.
        """
        first = next(iter(self._roots.values()))
        # The sign of a zero must not depend on which virtual workers had no gradient.
        torch.add(first.flat, 0.0, out=self._result.flat)
        # Reading this waits for the device, so only a rank that lacks gradients checks whether other ranks have them.
        if is_shared and len(self._present) < len(self.parameters):
            self._present = {place for place, number in enumerate(self._result.presence.tolist()) if number}
        for place in self._present:
            parameter, view = self.parameters[place], self._result.reals[place]
            parameter.grad = torch.view_as_complex(view) if parameter.is_complex() else view


def _add(left: Gradients, right: Gradients) -> Gradients:
    """Add the gradients of a subtree to those of its sibling. None counts as zero."""
    _each(torch._foreach_add_, left, right)
    return [other if own is None else own for own, other in zip(left, right, strict=True)]


def _each(
    function: Callable[[list[Tensor], list[Tensor]], Any], left: Sequence[Tensor | None], right: Gradients
) -> None:
    """Call one of torch's functions on lists of tensors with the pairs of which neither is None."""
    pairs = [(own, other) for own, other in zip(left, right, strict=True) if own is not None and other is not None]
    if pairs:
        owns, others = zip(*pairs, strict=True)
        function([*owns], [*others])


def _real(gradient: Tensor) -> Tensor:
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


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

    Returns:
        View of real numbers, which has an axis of 2 more for a complex parameter.
    """
    like = _real(torch.empty_like(parameter.detach(), device="meta"))
    return piece.as_strided(like.size(), like.stride())
