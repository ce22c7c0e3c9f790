"""Sums of gradients over ranks in buckets, which are sent while the backward pass of a step's last micro-batch is still running.

The scheme is that of torch's DistributedDataParallel (Li et al. 2020, arXiv:2006.15704, section 3.2): buckets take the parameters in
reverse order, so that they fill in about the order in which gradients are computed. Unlike in DistributedDataParallel, a parameter
without a gradient costs nothing: each bucket also counts the ranks that have a gradient of each parameter, and a gradient that no rank
has stays None.

A backward pass can add to a gradient several times, as when activation checkpointing with use_reentrant=True runs a layer twice. It is then
not known when a bucket is complete. The first step therefore sends all buckets after its backward pass, and so do later steps if a
gradient was added to several times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.device_clock import Mark, mark_on

FIRST_BUCKET_BYTES = 2**20
"""Maximum size of the first bucket in bytes. It is small so that communication starts early."""
BUCKET_BYTES = 25 * 2**20
"""Maximum size of all other buckets in bytes."""


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    flat: Tensor
    """Gradients of all parameters, followed by one count per parameter."""
    views: list[Tensor]
    """Views of `flat` in the shapes of the parameters."""
    counts: Tensor
    """View of `flat` with the number of ranks that have a gradient of each parameter."""
    ready: set[int] = field(default_factory=set)
    """Places of the parameters whose gradients the last backward pass has added to."""
    sent: Tensor | None = None
    work: dist.Work | None = field(default=None, repr=False)

    @property
    def is_complete(self) -> bool:
        return len(self.ready) == len(self.parameters)


class GradientBuckets:
    """Sums the gradients of dense parameters over the ranks of a process group.

    The buckets keep their memory between steps. During a step, each gradient is a view of its bucket.

    Args:
        parameters: Dense parameters that may get a gradient, the same on every rank.
        group: Process group of the ranks.
        sent_as: Dtype in which gradients are sent; None for their own dtype.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, sent_as: torch.dtype | None = None
    ):
        self._group = group
        self._sent_as = sent_as
        self._buckets = [_make_bucket(each) for each in _assigned(parameters)]
        self._place = {
            parameter: (bucket, index) for bucket in self._buckets for index, parameter in enumerate(bucket.parameters)
        }
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for each in self._place
        ]
        self._is_last = False
        self._next = 0
        self._overlaps = False
        """Whether a backward pass sends buckets; False in the first step."""
        self._repeats = False
        """Whether a backward pass has added to a gradient several times."""
        self.ready: Mark | None = None
        """Time at which the backward pass sent its latest bucket; None if it has sent none."""

    def close(self) -> None:
        """Remove the hooks from the parameters.

        Parameters and hooks refer to each other through torch's C++ objects, where the garbage collector does not find such a cycle. With
        the hooks in place, neither the parameters nor the buckets would ever be freed.
        """
        for hook in self._hooks:
            hook.remove()

    @property
    def num_sent(self) -> int:
        """Number of buckets that the last backward pass of the step has sent."""
        return self._next

    def begin_last(self) -> None:
        """Begin the last backward pass of the step. From the second step on, it sends buckets as soon as they are complete."""
        self._is_last = True
        self._next = 0
        self.ready = None
        for bucket in self._buckets:
            bucket.ready = set()

    def finish(self) -> None:
        """Send the remaining buckets, wait for all sums, and store the sums as the gradients of the parameters."""
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        self._is_last, self._next, self._overlaps = False, len(self._buckets), not self._repeats
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            if bucket.sent is not None:
                _as_real(bucket.flat).copy_(bucket.sent)
            bucket.work = bucket.sent = None
            absent = [place for place, each in enumerate(bucket.parameters) if each.grad is None]
            # Reading the counts waits for the device, so only a rank that lacks gradients checks whether other ranks have them.
            counts = bucket.counts.abs().tolist() if absent else []
            for place in absent:
                if counts[place]:
                    bucket.parameters[place].grad = bucket.views[place]

    def _accumulated(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        bucket, index = self._place[parameter]
        view = bucket.views[index]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        if not self._is_last:
            return
        if index in bucket.ready:
            self._repeats, self._overlaps = True, False
            if bucket.work is not None:
                raise UsageError(
                    "a backward pass added to a gradient again after it had been sent, which did not happen in the first step; "
                    "if the model uses activation checkpointing, set use_reentrant=False"
                )
        bucket.ready.add(index)
        # All ranks send the buckets in the same order, because their collectives must match.
        while self._overlaps and self._next < len(self._buckets) and self._buckets[self._next].is_complete:
            self._send(self._buckets[self._next])
            self._next += 1
            self.ready = mark_on(view.device)

    def _send(self, bucket: _Bucket) -> None:
        has = [parameter.grad is not None for parameter in bucket.parameters]
        for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:  # set by the script, not by a backward pass
                view.copy_(parameter.grad)
                parameter.grad = view
        if all(has):
            bucket.counts.fill_(1)
        else:
            bucket.counts.copy_(torch.tensor(has, device="cpu"))
        flat = _as_real(bucket.flat)
        sent = flat if self._sent_as is None else flat.to(self._sent_as)
        bucket.sent = None if sent is flat else sent
        bucket.work = dist.all_reduce(sent, group=self._group, async_op=True)


def _assigned(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Assign parameters to buckets of one dtype and device. A bucket with several parameters has at most BUCKET_BYTES."""
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        bucket, size = open_buckets.get(kind, ([], 0))
        limit = FIRST_BUCKET_BYTES if bucket and buckets[0] is bucket else BUCKET_BYTES
        if not bucket or size + parameter.nbytes > limit:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[kind] = (bucket, size + parameter.nbytes)
    return buckets


def _make_bucket(parameters: list[nn.Parameter]) -> _Bucket:
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes) + len(parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    *pieces, counts = torch.split(flat, [*sizes, len(parameters)])
    views = [_shaped_like(parameter, piece) for parameter, piece in zip(parameters, pieces, strict=True)]
    return _Bucket(parameters, flat, views, counts)


def _shaped_like(parameter: nn.Parameter, piece: Tensor) -> Tensor:
    """Return a view of `piece` with the shape of the parameter.

    The view also has the strides of a channels-last parameter, because optimizers process all parameters at once only if gradients have
    the strides of their parameters.
    """
    is_channels_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    strides = parameter.stride() if is_channels_last else None
    return piece.as_strided(parameter.size(), strides) if strides else piece.view(parameter.size())


def _as_real(flat: Tensor) -> Tensor:
    """Return the same memory with a dtype that every backend can sum."""
    return torch.view_as_real(flat) if flat.is_complex() else flat
