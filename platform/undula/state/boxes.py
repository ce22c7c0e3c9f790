"""Boxes: the parts of a tensor that ranks with shards hold, and what they have in common. Pure."""

from collections.abc import Iterable
from math import prod
from typing import TypeAlias

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Place of a part of a tensor: offsets and sizes, by dimension."""


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole tensor."""
    return (0,) * len(shape), shape


def elements(box: Box) -> int:
    """Return the number of elements of a box."""
    return prod(box[1])


def intersection(one: Box, other: Box) -> Box | None:
    """Return the part that two boxes of a tensor have in common; None if they have no element in common."""
    offsets, sizes = [], []
    for begin, size, other_begin, other_size in zip(*one, *other, strict=True):
        low = max(begin, other_begin)
        count = min(begin + size, other_begin + other_size) - low
        if count <= 0:
            return None
        offsets.append(low)
        sizes.append(count)
    return tuple(offsets), tuple(sizes)


def difference(box: Box, other: Box) -> list[Box]:
    """Return disjoint boxes that together have the elements of `box` that are not in `other`."""
    common = intersection(box, other)
    if common is None:
        return [box] if elements(box) else []
    parts, (offsets, sizes) = [], box
    for dimension, (low, count) in enumerate(zip(*common, strict=True)):
        end, stop = offsets[dimension] + sizes[dimension], low + count
        for begin, until in ((offsets[dimension], low), (stop, end)):
            if begin < until:
                parts.append((_with(offsets, dimension, begin), _with(sizes, dimension, until - begin)))
        # The slabs on both sides are done; what remains is as wide as the common part in this dimension.
        offsets, sizes = _with(offsets, dimension, low), _with(sizes, dimension, count)
    return parts


def without(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes that together have the elements of `box` that are in none of the others."""
    rest = [box] if elements(box) else []
    for other in others:
        if not rest:
            break
        rest = [part for each in rest for part in difference(each, other)]
    return rest


def split(box: Box, most: int) -> list[Box]:
    """Return boxes of at most `most` elements, or of one element, that together make up a box, in the order of its elements."""
    offsets, sizes = box
    count = elements(box)
    if count <= max(most, 1):
        return [box] if count else []
    dimension = next(place for place, size in enumerate(sizes) if size > 1)
    rows = max(most * sizes[dimension] // count, 1)
    end, parts = offsets[dimension] + sizes[dimension], []
    for begin in range(offsets[dimension], end, rows):
        part = _with(offsets, dimension, begin), _with(sizes, dimension, min(rows, end - begin))
        parts += split(part, most)
    return parts


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])
