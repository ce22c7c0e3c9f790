"""Division of parameters into buckets, each of which holds their gradients in one contiguous tensor."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

FIRST_BUCKET_BYTES = 2**20
"""Maximum size of the first bucket in bytes. It is small so that communication starts early."""
BUCKET_BYTES = 25 * 2**20
"""Maximum size of all other buckets in bytes."""


@dataclass
class Bucket:
    """Gradients of some parameters of one dtype and device."""

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
    """Tensor that is being summed over the ranks, if that is not `flat`."""
    work: dist.Work | None = field(default=None, repr=False)

    @property
    def is_complete(self) -> bool:
        return len(self.ready) == len(self.parameters)


def divide(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """Divide parameters into buckets in reverse order. A bucket with several parameters has at most BUCKET_BYTES."""
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
    return list(map(_make_bucket, divided))


def _make_bucket(parameters: list[nn.Parameter]) -> Bucket:
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes) + len(parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    *pieces, counts = torch.split(flat, [*sizes, len(parameters)])
    views = [_shaped_like(parameter, piece) for parameter, piece in zip(parameters, pieces, strict=True)]
    return Bucket(parameters, flat, views, counts)


def _shaped_like(parameter: nn.Parameter, piece: Tensor) -> Tensor:
    """Return a view of `piece` with the shape of the parameter.

    The view also has the strides of a channels-last parameter, because optimizers process all parameters at once only if gradients have
    the strides of their parameters.
    """
    is_channels_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return piece.as_strided(parameter.size(), parameter.stride()) if is_channels_last else piece.view(parameter.size())
