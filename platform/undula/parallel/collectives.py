"""Collectives of torch.distributed over the ranks of a process group."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

AllReduce: TypeAlias = Callable[[Tensor], None]
"""Function that sums a tensor over the ranks of a process group, in place."""


def all_reduce_over(group: dist.ProcessGroup) -> AllReduce:
    """Return a function that sums tensors over a process group with torch.distributed."""
    return partial(_all_reduce, group)


def _all_reduce(group: dist.ProcessGroup, tensor: Tensor) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)


def broadcast_from_rank_0(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Copy the parameters and buffers of rank 0 to every other rank."""
    if dist.get_world_size(group) > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            own = tensor.detach()
            sent = own.contiguous()
            # Tensors are sent as bytes because gloo supports only some dtypes.
            dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=0)
            if sent is not own:
                own.copy_(sent)
