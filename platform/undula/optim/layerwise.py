"""What LARS and LAMB have in common: batches of parameters, norms of whole tensors, and the check for sparse gradients."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from undula.errors import RunError


def batches(params: Iterable[Tensor], optimizer: str) -> list[list[Tensor]]:
    """Parameters that have a gradient, in batches that foreach operations can process.

    The tensors of a batch have the same device, dtype and device mesh, and either all or none of them are matrices (two dimensions or
    more). The order is the same on all ranks.

    Raises:
        RunError: A gradient is sparse.
    """
    found: dict[object, list[Tensor]] = {}
    for parameter in params:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            raise RunError(
                f"{optimizer} does not support sparse gradients: create the embedding with sparse=False, or use SGD"
            )
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        key = (parameter.device, parameter.dtype, mesh, parameter.ndim > 1)
        found.setdefault(key, []).append(parameter)
    return list(found.values())


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of each tensor as a whole, also where ranks hold shards of it; all ranks must call this together.

    The norms of sharded tensors take one collective for all of them.
    """
    found = torch.stack(torch._foreach_norm(list(tensors)))
    return found.full_tensor() if isinstance(found, DTensor) else found


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The part of each tensor that this rank holds, which shares its memory; a tensor that is not sharded is its own part."""
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
