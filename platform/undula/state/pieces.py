"""What one rank holds of a run's state: all of a tensor, or the part that sharding has left it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

from torch import Tensor

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part lies in its tensor: offsets, sizes."""
Sharding: TypeAlias = Mapping[str, tuple[tuple[int, ...], Box]]
"""By name of a tensor: shape of all of it, place of a part."""


@dataclass(frozen=True)
class Part:
    """A rank's part of a tensor."""

    tensor: Tensor
    shape: tuple[int, ...]
    """Of the whole."""
    offsets: tuple[int, ...]

    @property
    def box(self) -> Box:
        return self.offsets, tuple(self.tensor.shape)


@dataclass(frozen=True)
class RankState:
    """A rank's tensors, as parts, and values that are no tensors, by name."""

    parts: Mapping[str, Part]
    values: Mapping[str, Any]

    @property
    def sharding(self) -> Sharding | None:
        """None where every tensor is whole."""
        is_whole = all(part.box == (tuple(0 for _ in part.shape), part.shape) for part in self.parts.values())
        return None if is_whole else {name: (part.shape, part.box) for name, part in self.parts.items()}

    @property
    def bytes(self) -> int:
        """Of the tensors."""
        return sum(part.tensor.nbytes for part in self.parts.values())

    def whole(self) -> dict[str, Any]:
        """Tensors and values, where every tensor is whole."""
        return {**{name: part.tensor for name, part in self.parts.items()}, **self.values}

    def on_host(self) -> "RankState":
        """With the tensors in host memory; those that are there already are not copied."""
        parts = {name: replace(part, tensor=part.tensor.cpu()) for name, part in self.parts.items()}
        return RankState(parts, self.values)


def is_sharded_tensor(value: object) -> bool:
    """Whether a rank has only a part of a tensor. Who has such tensors has the module of their class, which takes a second to import."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def part_of(value: Any) -> Part:
    """What this rank has of a tensor."""
    if not is_sharded_tensor(value):
        return Part(value.detach(), tuple(value.shape), (0,) * value.dim())
    (chunk,) = value.__create_chunk_list__()
    return Part(value.to_local().detach(), tuple(value.shape), tuple(chunk.offsets))


def rank_state(state: Mapping[str, Any]) -> RankState:
    """A flat state of tensors and values, as this rank holds it."""
    parts = {name: part_of(value) for name, value in state.items() if isinstance(value, Tensor)}
    return RankState(parts, {name: value for name, value in state.items() if name not in parts})


def is_complete(shardings: Sequence[Sharding | None]) -> bool:
    """Whether ranks hold all of a state together."""
    if None in shardings:
        return True
    boxes: dict[str, set[Box]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for sharding in shardings:
        for name, (shape, box) in (sharding or {}).items():
            boxes.setdefault(name, set()).add(box)
            shapes[name] = shape
    # The parts of one state do not overlap, so that their sizes tell.
    return bool(boxes) and all(sum(prod(sizes) for _, sizes in boxes[name]) == prod(shapes[name]) for name in boxes)


def copy_overlap(box: Box, source: Tensor, target: Part) -> None:
    """Copy what two parts of one tensor have in common.

    Args:
        box: of the source.
        source: its elements.
        target: gets them.
    """
    into, out_of = [], []
    for (begin, size), (own, own_size) in zip(zip(*box, strict=True), zip(*target.box, strict=True), strict=True):
        low, high = max(begin, own), min(begin + size, own + own_size)
        if low >= high:
            return
        into.append(slice(low - own, high - own))
        out_of.append(slice(low - begin, high - begin))
    target.tensor[tuple(into)].copy_(source[tuple(out_of)])
