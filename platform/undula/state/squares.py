"""Sums of squares whose bits depend neither on the order of the terms nor on how tensors are split.

A sum of squares is rounded correctly to float32, and there is only one such number. Nearly always, a sum in float64 with a bound of its
error tells which. Where it is too close to the middle between two numbers of float32, the sum is computed in integers.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from undula.state.pieces import as_real, is_sharded_tensor, local_part

PART = 2**16
"""Number of elements that are summed at once. The bound of the error holds for so many."""
ERROR = 1e-11
"""Upper bound of the relative error of a sum in float64: 2^16 additions in any order make one of at most 7.3e-12."""
_MANTISSA_BITS, _LEAST_EXPONENT, _EXPONENTS = 24, -149, 280
"""Numbers of float32 are integers of 24 bits, times a power of two whose exponent is one of these."""


def square_sums(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the sum of the squares of all elements of each group of tensors of one precision; shape [groups].

    If ranks have shards of the tensors, the sums are over all ranks, and all ranks must call this. On GPUs, and for tensors in float64,
    sums are not rounded correctly, because a GPU would have to be waited for.
    """
    shards = [[_local(tensor) for tensor in group] for group in groups]
    parts = [[part for shard in group for part in torch.split(shard, PART)] for group in shards]
    flat = [part for group in parts for part in group]
    if not flat:
        return torch.zeros(len(groups), device="cpu")
    norms = torch.stack(torch._foreach_norm(flat, 2, dtype=torch.float64))
    sums = norms.square()
    if any(len(of_group) != 1 for of_group in parts):
        sums = torch.stack([each.sum() for each in torch.split(sums, list(map(len, parts)))])
    every: list[Any] = [tensor for group in groups for tensor in group]
    sharded = next(filter(is_sharded_tensor, every), None)
    _add_up(sums, sharded)
    if flat[0].dtype == torch.float64:
        return sums
    low, high = (sums * (1 - ERROR)).float(), (sums * (1 + ERROR)).float()
    if sums.device.type == "cpu":
        for place in ((low != high) & sums.isfinite()).nonzero().flatten().tolist():
            low[place] = torch.tensor(
                _exact(shards[place], sharded), dtype=torch.float64, device="cpu"
            )  # may round to infinity
    return low


def _local(tensor: Any) -> Tensor:
    """Return the stored elements that this rank has of a tensor, as real numbers of at least 32 bits; shape [elements]."""
    own = local_part(tensor)
    own = as_real(own.coalesce().values() if own.is_sparse else own).detach().reshape(-1)
    return own.to(torch.promote_types(own.dtype, torch.float32))


def _add_up(values: Tensor, sharded: Any) -> None:
    """Sum values over the ranks among which a tensor is sharded. Several copies of a shard count once. None is for a whole tensor."""
    for dimension, placement in enumerate(sharded.placements if sharded is not None else ()):
        if placement.is_shard():
            mesh = sharded.device_mesh
            there = values.to(mesh.device_type)  # NCCL sums no numbers of shards in host memory
            dist.all_reduce(there, group=mesh.get_group(dimension))
            if there is not values:
                values.copy_(there)


def _exact(shards: Sequence[Tensor], sharded: Any) -> float:
    """Return a sum of squares rounded to float32, from integers whose sums are exact in any order.

    The squared integers of the numbers of each exponent are summed in two halves, each of which fits for up to 2^39 numbers.
    """
    sums = torch.zeros(2, _EXPONENTS, dtype=torch.int64, device="cpu")
    for part in (part for shard in shards for part in torch.split(shard, PART)):
        mantissas, exponents = torch.frexp(part)
        squares = (mantissas * 2.0**_MANTISSA_BITS).long().square()
        places = exponents.long() - _LEAST_EXPONENT
        sums[0].index_add_(0, places, squares >> _MANTISSA_BITS)
        sums[1].index_add_(0, places, squares % 2**_MANTISSA_BITS)
    _add_up(sums, sharded)
    high, low = sums.tolist()
    total = sum(
        ((one << _MANTISSA_BITS) + other) << (2 * place)
        for place, (one, other) in enumerate(zip(high, low, strict=True))
    )
    return _nearest(total, 2 * (_LEAST_EXPONENT - _MANTISSA_BITS))


def _nearest(number: int, exponent: int) -> float:
    """Return the float32 nearest to an integer times a power of two, the even one of two that are equally near."""
    excess = max(number.bit_length() - _MANTISSA_BITS, _LEAST_EXPONENT - exponent, 0)
    whole, rest = number >> excess, number % (1 << excess)
    half = 1 << excess >> 1
    rounds_up = rest > half or (rest == half and excess > 0 and whole % 2 == 1)
    return math.ldexp(whole + rounds_up, exponent + excess)
