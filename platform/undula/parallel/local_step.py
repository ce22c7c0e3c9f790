"""Step of an optimizer on the parts of sharded tensors that a rank holds, as plain tensors.

The operations and the bits are the same. What is saved is torch's work to find out how each operation is computed on shards: a third of a
second in the first step of every worker group, because torch keeps what it has found for one thread and one mesh only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from undula.state.pieces import is_sharded_tensor, local_part, shard_with


@contextmanager
def on_local_parts(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer see its sharded parameters, their gradients and its state as plain tensors in the same memory."""
    params = [group["params"] for group in optimizer.param_groups]
    before = dict(optimizer.state)
    with torch.no_grad():
        parts = {shard: _part_of(shard) for of_group in params for shard in of_group}
        local = {shard: _local_state(state) for shard, state in before.items() if shard in parts}
    states = {parts[shard]: dict(state) for shard, state in local.items()}
    _replace(optimizer, [[parts[shard] for shard in of_group] for of_group in params], states)
    try:
        yield
    finally:
        after = dict(before)
        for shard, part in parts.items():
            state = optimizer.state.pop(part, None)  # one after another, because a state that is offloaded is copied
            if state is not None:
                given = local.get(shard, {})
                after[shard] = {
                    name: before[shard][name]
                    if name in given and value is given[name]
                    else _sharded(value, shard, part)
                    for name, value in state.items()
                }
        _replace(optimizer, params, after)


def _replace(optimizer: Optimizer, params: list[list[nn.Parameter]], states: dict[Any, dict[str, Any]]) -> None:
    for group, of_group in zip(optimizer.param_groups, params, strict=True):
        group["params"] = of_group
    optimizer.state.clear()
    optimizer.state.update(states)


def _part_of(shard: nn.Parameter) -> nn.Parameter:
    part = nn.Parameter(local_part(shard), shard.requires_grad)
    part.grad = None if shard.grad is None else local_part(shard.grad)
    return part


def _local_state(state: dict[str, Any]) -> dict[str, Any]:
    return {name: local_part(value) for name, value in state.items()}


def _sharded(value: Any, shard: nn.Parameter, part: nn.Parameter) -> Any:
    """Return a value that a step has added to the state of a parameter. Values of its shape are shards as it is."""
    is_like_it = isinstance(value, Tensor) and is_sharded_tensor(shard) and value.shape == part.shape
    return shard_with(value, shard) if is_like_it else value
