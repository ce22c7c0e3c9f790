"""Adasum: gradients that agree are averaged, orthogonal ones are added, layer by layer and two at a time.

Maleki et al. 2020, arXiv:2006.02924, equation 4. Pure functions of tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Interval = tuple[int, int]
"""First virtual worker, and the one after the last."""


def adasum(one: Tensor, other: Tensor) -> Tensor:
    """The combination of two gradients of a layer."""
    dot, one_squared, other_squared = (
        float(torch.dot(left.flatten().double(), right.flatten().double()))
        for left, right in ((one, other), (one, one), (other, other))
    )
    one_part = 1 - dot / (2 * one_squared) if one_squared else 1.0
    other_part = 1 - dot / (2 * other_squared) if other_squared else 1.0
    return one * one_part + other * other_part


def halves(interval: Interval) -> tuple[Interval, Interval]:
    """The two subtrees of an interval; the first is as long as the largest power of two below its length."""
    begin, end = interval
    middle = begin + 2 ** ((end - begin - 1).bit_length() - 1)
    return (begin, middle), (middle, end)


def largest_within(interval: Interval, shares: Sequence[range]) -> list[Interval]:
    """The largest subtrees of `interval` that a rank has the whole of, given each rank's virtual workers."""
    begin, end = interval
    if any(share.start <= begin and end <= share.stop for share in shares):
        return [interval]
    return [found for half in halves(interval) for found in largest_within(half, shares)]
