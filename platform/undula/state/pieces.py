"""State in pieces: what a rank holds of each tensor of a run, and whether some ranks hold all of it together."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from undula.errors import CheckpointError

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Place of a piece in its tensor: offsets and sizes, by dimension."""
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a tensor: all of it, or a box.

    A piece can be a shard of a parameter, a small tensor that all ranks have, or private to a rank although the model is not
    sharded: of a tensor with one row for each virtual worker a rank holds the rows of its own.
    """

    tensor: Tensor
    """Elements of the box."""
    shape: Shape
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Place of the first element of the box in the whole tensor."""
    is_replicated: bool = True
    """Whether every other rank holds the same piece."""

    @property
    def box(self) -> Box:
        return self.offsets, tuple(self.tensor.shape)

    @property
    def is_whole(self) -> bool:
        return tuple(self.tensor.shape) == self.shape


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a whole tensor."""

    dtype: str
    """Name in torch: `float32`."""
    shape: Shape


Table: TypeAlias = Mapping[str, TensorSpec]
"""Tensors that a state consists of, by name."""


@dataclass(frozen=True)
class Holding:
    """What a rank holds of a state, without the tensors: what ranks tell each other to find out whether the state is complete."""

    expected: Table
    """All tensors of the state, whether this rank has pieces of them or not."""
    boxes: Mapping[str, Box]
    """Places of this rank's pieces, by name."""


@dataclass(frozen=True)
class RankState:
    """A rank's pieces of a state, and the values of the state that are no tensors, by name."""

    pieces: Mapping[str, Piece]
    values: Mapping[str, Any]
    elsewhere: Table = field(default_factory=dict)
    """Tensors of the state of which only other ranks have pieces, as those of another pipeline stage."""

    @property
    def expected(self) -> Table:
        """All tensors of the state."""
        return {**{name: spec_of(piece) for name, piece in self.pieces.items()}, **self.elsewhere}

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of the state."""
        return not self.elsewhere and all(piece.is_whole for piece in self.pieces.values())

    @property
    def holding(self) -> Holding | None:
        """None where this rank has all of the state."""
        if self.is_whole:
            return None
        return Holding(self.expected, {name: piece.box for name, piece in self.pieces.items()})

    @property
    def bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(piece.tensor.nbytes for piece in self.pieces.values())

    def whole(self) -> dict[str, Any]:
        """Tensors and values by name, where this rank has all of the state."""
        return {**{name: piece.tensor for name, piece in self.pieces.items()}, **self.values}

    def on_host(self) -> "RankState":
        """The same state with its tensors in host memory. Tensors that are there already are not copied."""
        pieces = {name: replace(piece, tensor=piece.tensor.cpu()) for name, piece in self.pieces.items()}
        return replace(self, pieces=pieces)


def is_sharded_tensor(value: object) -> bool:
    """Whether a rank has only a shard of a tensor. Whoever has such tensors has imported their class, which takes a second."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def piece_of(value: Any) -> Piece:
    """What this rank has of a tensor, which may be a DTensor."""
    if not is_sharded_tensor(value):
        return Piece(value.detach(), tuple(value.shape), (0,) * value.dim())
    (chunk,) = value.__create_chunk_list__()
    local = value.to_local().detach()
    return Piece(
        local, tuple(value.shape), tuple(chunk.offsets), is_replicated=tuple(local.shape) == tuple(value.shape)
    )


def rows_of(rows: Tensor, first: int, count: int) -> Piece:
    """The piece of a rank that holds some rows of a tensor, those of its virtual workers.

    Args:
        rows: shape [rows of this rank, ...].
        first: number of the first of them.
        count: number of rows of the whole tensor.
    """
    shape = (count, *rows.shape[1:])
    return Piece(rows, shape, (first, *(0 for _ in rows.shape[1:])), is_replicated=False)


def spec_of(piece: Piece) -> TensorSpec:
    """Type and shape of a piece's whole tensor."""
    return TensorSpec(str(piece.tensor.dtype).removeprefix("torch."), piece.shape)


def rank_state(state: Mapping[str, Any]) -> RankState:
    """A flat state of tensors, pieces and values, as this rank holds it."""
    pieces = {
        name: value if isinstance(value, Piece) else piece_of(value)
        for name, value in state.items()
        if isinstance(value, Tensor | Piece)
    }
    return RankState(pieces, {name: value for name, value in state.items() if name not in pieces})


def is_complete(holdings: Iterable[Holding | None]) -> bool:
    """Whether ranks hold all of a state together: the boxes of every expected tensor cover its shape.

    Args:
        holdings: one for each rank; None stands for all of the state.
    """
    boxes: dict[str, set[Box]] = {}
    expected: dict[str, TensorSpec] = {}
    for holding in holdings:
        if holding is None:
            return True
        expected |= holding.expected
        for name, box in holding.boxes.items():
            boxes.setdefault(name, set()).add(box)
    # Boxes of one state are equal or do not overlap, so that their sizes tell whether they cover the tensor.
    return bool(expected) and all(
        sum(prod(sizes) for _, sizes in boxes.get(name, ())) == prod(spec.shape) for name, spec in expected.items()
    )


def copy_overlap(box: Box, source: Tensor, target: Piece) -> None:
    """Copy what two pieces of one tensor have in common.

    Args:
        box: place of the source.
        source: elements of that box.
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


def overlaps(one: Box, other: Box) -> bool:
    """Whether two boxes of one tensor have elements in common."""
    sides: Sequence[tuple[int, int, int, int]] = list(zip(*one, *other, strict=True))
    return all(max(begin, own) < min(begin + size, own + own_size) for begin, size, own, own_size in sides)


def dtype_named(name: str) -> torch.dtype:
    """The type that a checkpoint or a snapshot names, as "float32".

    Raises:
        CheckpointError: torch does not have it.
    """
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a checkpoint names the dtype {name!r}, which torch does not have")
    return dtype
