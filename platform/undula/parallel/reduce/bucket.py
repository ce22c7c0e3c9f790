"""Buckets: gradients of several parameters in one contiguous tensor, and their sums along the tree over the virtual workers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from undula.errors import UsageError
from undula.plan.tree import BUCKET_BYTES, Fold, Node

FIRST_BUCKET_BYTES = 2**20
"""Maximum size of the first bucket in bytes. It is small so that communication starts early."""
ALIGNMENT = 64
"""Bytes at whose multiples views and slices begin. Kernels may add unaligned numbers in another order."""

Gradients = list[Tensor | None]
"""Gradient of each parameter of a bucket, as real numbers; None for a parameter without one."""


class Bucket:
    """Gradients of some parameters of one dtype and device.

    The gradient of a virtual worker, a *leaf*, accumulates in the parameters. A leaf that is closed is added to the others along the tree.
    Since a script may have kept it, a leaf to which others are added is copied first. The first leaf of a root is copied to a buffer of
    this root, which keeps its memory between steps. The sum of a step has memory of its own, because an optimizer may keep that as well.

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
        self._dtype = parameters[0].dtype.to_real()
        self._sent_as = sent_as or self._dtype
        unit = ALIGNMENT // min(self._dtype.itemsize, self._sent_as.itemsize)
        self._sizes = [_rounded_up(each.numel() * (1 + each.is_complex()), unit) for each in parameters]
        """Number of real numbers that each gradient takes, with its padding."""
        numel = _rounded_up(sum(self._sizes) + len(parameters), unit * num_slices)
        make_buffer = partial(torch.zeros, numel, dtype=self._sent_as, device=parameters[0].device)
        self._buffers = {begin: make_buffer() for begin, _ in roots}
        """Buffer of each root of this rank, by its first virtual worker: gradients, a number for each parameter, which is 0 if it has none,
        and padding; shape [numel]."""
        self._views = {begin: self._views_of(buffer) for begin, buffer in self._buffers.items()}
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
        leaf: Gradients = [None] * len(self.parameters)
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                leaf[place] = self._real(parameter.grad)
                self._present.add(place)
        self._push(virtual_worker, leaf)
        if not is_last:
            for parameter in self.parameters:
                parameter.grad = None

    def skip_leaf(self, virtual_worker: int) -> None:
        """Close the leaf of a virtual worker that has no samples in the step. It counts as zero."""
        self._push(virtual_worker, [None] * len(self.parameters))

    def _push(self, virtual_worker: int, leaf: Gradients) -> None:
        if views := self._views.get(virtual_worker):
            for view, gradient in zip(views, leaf, strict=True):
                if gradient is None:
                    view.zero_()
            _each(torch._foreach_copy_, views, leaf)
            self._fold.push(virtual_worker, [*views])
            return
        if self._sent_as != self._dtype:
            leaf = [None if gradient is None else gradient.to(self._sent_as) for gradient in leaf]
        self._fold.push(virtual_worker, leaf)
        node = (virtual_worker, virtual_worker + 1)
        if node in self._fold.roots:
            copies = [None if gradient is None else torch.empty_like(gradient) for gradient in leaf]
            _each(torch._foreach_copy_, copies, leaf)
            self._fold.roots[node] = copies

    def roots(self) -> list[Tensor]:
        """Return the sums of this rank's subtrees, each of shape [numel]."""
        for buffer in self._buffers.values():
            presence = self._presence_of(buffer).fill_(1)
            for place in set(range(len(self.parameters))) - self._present:
                presence[place] = 0
        return [*self._buffers.values()]

    def store(self, is_shared: bool) -> None:
        """Set the gradients of the parameters to the sum of the step, which is in the memory of this rank's first root.

        Args:
            is_shared: Whether it includes the sums of other ranks, which may have gradients of other parameters.
        """
        # The sign of a zero must not depend on which virtual workers had no gradient.
        total = (next(iter(self._buffers.values())) + 0.0).to(self._dtype)
        # Reading this waits for the device, so only a rank that lacks gradients checks whether other ranks have them.
        if is_shared and len(self._present) < len(self.parameters):
            self._present = {place for place, number in enumerate(self._presence_of(total).tolist()) if number}
        views = self._views_of(total)
        for place in self._present:
            parameter, view = self.parameters[place], views[place]
            parameter.grad = torch.view_as_complex(view) if parameter.is_complex() else view

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """Return views of a tensor of shape [numel] as gradients of the parameters, with an axis of 2 more for complex ones."""
        return list(map(_shaped_like, self.parameters, torch.split(flat[: sum(self._sizes)], self._sizes)))

    def _presence_of(self, flat: Tensor) -> Tensor:
        """Return the part of a tensor of shape [numel] that says which parameters have a gradient; shape [parameters]."""
        return flat[sum(self._sizes) :][: len(self.parameters)]

    def _real(self, gradient: Tensor) -> Tensor:
        """Return a gradient as real numbers of the bucket's dtype.

        Raises:
            UsageError: It is sparse, although no layer was made with sparse=True.
        """
        if gradient.is_sparse:
            raise UsageError(
                "a backward pass computed a sparse gradient of a parameter of no layer that was made with sparse=True; use "
                "nn.Embedding(..., sparse=True), or call F.embedding() without sparse=True"
            )
        return _as_real(gradient.detach()).to(self._dtype)


def _add(left: Gradients, right: Gradients) -> Gradients:
    """Add the gradients of a subtree to those of its sibling. None counts as zero."""
    _each(torch._foreach_add_, left, right)
    return [own if own is not None or other is None else other.clone() for own, other in zip(left, right, strict=True)]


def _each(
    function: Callable[[list[Tensor], list[Tensor]], Any], left: Sequence[Tensor | None], right: Gradients
) -> None:
    """Call one of torch's functions on lists of tensors with the pairs of which neither is None."""
    pairs = [(own, other) for own, other in zip(left, right, strict=True) if own is not None and other is not None]
    if pairs:
        owns, others = zip(*pairs, strict=True)
        function([*owns], [*others])


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()


def divide(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters among buckets in reverse order, in which they get their gradients.

    A bucket of several parameters has at most BUCKET_BYTES, and the first one at most FIRST_BUCKET_BYTES.
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
    like = _as_real(torch.empty_like(parameter.detach(), device="meta"))
    return piece.as_strided(like.size(), like.stride())
