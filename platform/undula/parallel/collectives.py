"""Collectives over the ranks of a group, as torch does them."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

AllReduce: TypeAlias = Callable[[Tensor], None]
"""Sums a tensor over the ranks of a group, in place."""


def all_reduce_over(group: dist.ProcessGroup) -> AllReduce:
    """The all-reduce of torch over a group."""
    return partial(_all_reduce, group)


def _all_reduce(group: dist.ProcessGroup, tensor: Tensor) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)


def broadcast_from_rank_0(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    if dist.get_world_size(group) > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            own = tensor.detach()
            sent = own.contiguous()
            # As bytes, because gloo knows only some of the types.
            dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=0)
            if sent is not own:
                own.copy_(sent)
