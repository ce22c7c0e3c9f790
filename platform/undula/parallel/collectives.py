"""Collectives over a group's ranks, as torch does them."""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

AllReduce: TypeAlias = Callable[[Tensor], None]
"""Sums a tensor over the ranks, in place."""


def sum_over_ranks(tensor: Tensor) -> None:
    """An AllReduce of torch's."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)


def broadcast_from_rank_0(module: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers."""
    if dist.get_world_size() > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            own = tensor.detach()
            sent = own.contiguous()
            dist.broadcast(sent.view(-1).view(torch.uint8), src=0)  # as bytes: of types, gloo knows but some
            if sent is not own:
                own.copy_(sent)
