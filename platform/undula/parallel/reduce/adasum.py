"""Adasum, which averages gradients that agree and adds orthogonal ones, layer by layer and two gradients at a time.

Maleki et al. 2020, arXiv:2006.02924, equation 4. Pure functions of tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Interval = tuple[int, int]
"""Consecutive virtual workers: the first one, and the one after the last."""


def adasum(one: Tensor, other: Tensor) -> Tensor:
    """Combine two gradients of a layer."""
    dot, one_squared, other_squared = (
        float(torch.dot(left.flatten().double(), right.flatten().double()))
        for left, right in ((one, other), (one, one), (other, other))
    )
    one_part = 1 - dot / (2 * one_squared) if one_squared else 1.0
    other_part = 1 - dot / (2 * other_squared) if other_squared else 1.0
    return one * one_part + other * other_part


def halves(interval: Interval) -> tuple[Interval, Interval]:
    """Split an interval into its two subtrees. The length of the first is the largest power of two below the length of the interval."""
    begin, end = interval
    middle = begin + 2 ** ((end - begin - 1).bit_length() - 1)
    return (begin, middle), (middle, end)


def largest_within(interval: Interval, shares: Sequence[range]) -> list[Interval]:
    """Return the largest subtrees of `interval` that belong to a single rank each, given the virtual workers of each rank."""
    begin, end = interval
    if any(share.start <= begin and end <= share.stop for share in shares):
        return [interval]
    return [found for half in halves(interval) for found in largest_within(half, shares)]
