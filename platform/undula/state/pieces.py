"""Pieces of state: the part that a rank holds of each tensor of a run, and the check that ranks together hold the whole state."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from undula.errors import CheckpointError, UsageError
from undula.state.boxes import Box, intersection, whole_box, without

Shape: TypeAlias = tuple[int, ...]
PART_BYTES = 256 * 2**20
"""Size in bytes of the parts in which a large tensor is copied to host memory."""


@dataclass(frozen=True)
class Piece:
    """Part of a tensor that a rank holds: the whole tensor, which all ranks hold, or the box that is the rank's shard of it."""

    tensor: Tensor
    """Elements of the box."""
    shape: Shape
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Index of the first element of the box in the whole tensor, by dimension."""
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
    """Dtype, shape and memory layout of a whole tensor."""

    dtype: str
    """Name of the dtype in torch, such as `float32`."""
    shape: Shape
    strides: Shape | None = None
    """Distance in memory between neighbouring elements, by dimension and in elements; None if no rank holds the whole tensor. A kernel
    chosen for another layout can produce other bits, so a restored tensor has the strides of the saved one."""


Table: TypeAlias = Mapping[str, TensorSpec]
"""Description of the tensors of a state, by name."""


@dataclass(frozen=True)
class Holding:
    """Extent of the part of a state that a rank holds. Ranks exchange these to find out whether they hold the whole state together."""

    expected: Table
    """All tensors of the state."""
    boxes: Mapping[str, Box]
    """Places of this rank's pieces, by name."""


@dataclass(frozen=True)
class Rows:
    """Tensors of which each belongs to one virtual worker, and is in the state of the rank that has it."""

    of: Mapping[int, Tensor]
    """Tensors of this rank's virtual workers, by number. All have the same dtype and shape."""
    count: int
    """Number of virtual workers of all ranks."""

    def __post_init__(self) -> None:
        if len({(row.dtype, row.shape) for row in self.of.values()}) != 1 or not {*self.of} <= {*range(self.count)}:
            raise UsageError(
                f"rows of the virtual workers {sorted(self.of)} of {self.count} were given; give one tensor for each virtual worker of "
                "this rank, all of one dtype and shape"
            )


@dataclass(frozen=True)
class RankState:
    """Pieces of a state that a rank holds, and the values of the state that are not tensors, by name."""

    pieces: Mapping[str, Piece]
    values: Mapping[str, Any]
    others: Table = field(default_factory=dict)
    """Tensors of the state of which other ranks have all."""

    @property
    def expected(self) -> Table:
        """All tensors of the state."""
        return {**self.others, **{name: spec_of(piece) for name, piece in self.pieces.items()}}

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds the whole state."""
        return not self.others and all(piece.is_whole for piece in self.pieces.values())

    @property
    def own(self) -> "RankState":
        """The part of the state that no other rank holds."""
        shards = self.shards
        common = {name: spec_of(piece) for name, piece in self.pieces.items() if name not in shards}
        own = {name: piece for name, piece in self.pieces.items() if name in shards}
        return RankState(own, self.values, {**self.others, **common})

    @property
    def holding(self) -> Holding | None:
        """Extent of this rank's pieces; None if it holds the whole state."""
        if self.is_whole:
            return None
        return Holding(self.expected, {name: piece.box for name, piece in self.pieces.items()})

    @property
    def shards(self) -> set[str]:
        """Names of the tensors of which this rank has a shard."""
        return {name for name, piece in self.pieces.items() if not piece.is_replicated}

    @property
    def bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(piece.tensor.nbytes for piece in self.pieces.values())

    @property
    def whole_bytes(self) -> int:
        """Size of all tensors of the state in bytes, including what other ranks hold."""
        return sum(prod(spec.shape) * dtype_named(spec.dtype).itemsize for spec in self.expected.values())

    def whole(self) -> dict[str, Any]:
        """Return tensors and values by name. This rank must hold the whole state."""
        return {**{name: piece.tensor for name, piece in self.pieces.items()}, **self.values}

    def on_host(self, copied: Callable[[], None] = lambda: None) -> "RankState":
        """Return the same state with its tensors in host memory. Tensors that are there already are not copied.

        Args:
            copied: Function that is called whenever a part of the state of about PART_BYTES or less was copied.
        """
        pieces = {name: replace(piece, tensor=_host_copy(piece.tensor, copied)) for name, piece in self.pieces.items()}
        return replace(self, pieces=pieces)


def is_sharded_tensor(value: object) -> bool:
    """Return whether a value is a DTensor, without importing that class, which would take a second.

    A process that has DTensors has imported their class already.
    """
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_part(tensor: Any) -> Tensor:
    """Return the part of a tensor that this rank holds, without copying: the whole tensor if it is not sharded."""
    part: Tensor = tensor.to_local() if is_sharded_tensor(tensor) else tensor
    return part


def shard_with(part: Tensor, like: Any) -> Tensor:
    """Return a tensor that is sharded as another one is, on the same device, and of which this rank holds `part`."""
    from torch.distributed.tensor import DTensor  # imported already, because there is a shard

    if like.device.type != like.device_mesh.device_type:  # to which from_local would move the part
        copied = torch.empty_like(like, dtype=part.dtype, requires_grad=False)
        local_part(copied).copy_(part)
        return copied
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_sharded(module: nn.Module) -> bool:
    """Return whether a parameter of a module is sharded."""
    return any(map(is_sharded_tensor, module.parameters()))


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as real numbers with one more dimension, and any other tensor unchanged.

    Neither safetensors nor every backend of torch.distributed supports complex numbers.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def piece_of(value: Any) -> Piece:
    """Return this rank's piece of a tensor, which may be a DTensor."""
    if not is_sharded_tensor(value):
        return Piece(value.detach(), tuple(value.shape), (0,) * value.dim())
    local = local_part(value).detach()
    is_replicated = all(placement.is_replicate() for placement in value.placements)
    return Piece(local, tuple(value.shape), _offsets(value), is_replicated)


def _offsets(shard: Any) -> tuple[int, ...]:
    """Return where the local part of a sharded tensor begins in each dimension.

    torch finds this for any mesh, but imports its checkpoints first, which takes a tenth of a second.
    """
    placements, mesh = shard.placements, shard.device_mesh
    if len(placements) > 1 or not (placements[0].is_shard() or placements[0].is_replicate()):
        (chunk,) = shard.__create_chunk_list__()
        return tuple(chunk.offsets)
    offsets = [0] * shard.dim()
    if placements[0].is_shard():
        dim = placements[0].dim
        size = shard.shape[dim]
        offsets[dim] = min(-(-size // mesh.size()) * mesh.get_local_rank(), size)
    return tuple(offsets)


def spec_of(piece: Piece) -> TensorSpec:
    """Return the dtype, the shape and, if the piece is whole, the strides of the whole tensor of a piece."""
    strides = dense_strides(piece.tensor) if piece.is_whole else None
    return TensorSpec(str(piece.tensor.dtype).removeprefix("torch."), piece.shape, strides)


def empty_tensor(spec: TensorSpec, device: torch.device | None = None) -> Tensor:
    """Return a whole tensor, with any elements, on a device or in host memory."""
    dtype, place = dtype_named(spec.dtype), device or torch.device("cpu")
    if spec.strides is None:
        return torch.empty(spec.shape, dtype=dtype, device=place)
    return torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=place)


def dense_strides(tensor: Tensor) -> Shape:
    """Return the strides of a copy of a tensor: its own strides, or those without gaps if its elements are not densely packed."""
    return torch.empty_like(tensor, device="meta").stride()


def rank_state(state: Mapping[str, Any]) -> RankState:
    """Return the state of this rank that a flat mapping of tensors, pieces, rows and values describes."""
    pieces: dict[str, Piece] = {}
    values: dict[str, Any] = {}
    others: dict[str, TensorSpec] = {}
    for name, value in state.items():
        if name in pieces or name in others:
            raise UsageError(f"the state has two tensors of the name {name!r}; give one of them another name")
        if isinstance(value, Tensor | Piece):
            pieces[name] = value if isinstance(value, Piece) else piece_of(value)
        elif isinstance(value, Rows):
            rows = {number: replace(piece_of(row), is_replicated=False) for number, row in value.of.items()}
            spec = spec_of(next(iter(rows.values())))
            pieces |= {f"{name}.{number}": row for number, row in rows.items()}
            others |= {f"{name}.{number}": spec for number in range(value.count) if number not in rows}
        else:
            values[name] = value
    return RankState(pieces, values, others)


def _host_copy(tensor: Tensor, copied: Callable[[], None]) -> Tensor:
    """Return a tensor in host memory: itself if it is there already, or else a copy with the same strides."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty_like(tensor, device="cpu")
    copy_in_parts(tensor, copy, copied)
    return copy


def copy_in_parts(source: Tensor, target: Tensor, copied: Callable[[], None]) -> None:
    """Copy a tensor in parts of PART_BYTES or of one row, if that is larger, and call `copied` after each."""
    if not source.dim():
        source, target = source[None], target[None]
    rows = max(PART_BYTES * len(source) // max(source.nbytes, 1), 1)
    for part, into in zip(torch.split(source, rows), torch.split(target, rows), strict=True):
        into.copy_(part)
        copied()


def is_complete(holdings: Iterable[Holding | None]) -> bool:
    """Return whether ranks together hold a whole state, so that their boxes cover every expected tensor.

    Args:
        holdings: Holding of each rank; None for a rank that holds the whole state.
    """
    boxes: dict[str, set[Box]] = {}
    expected: dict[str, TensorSpec] = {}
    for holding in holdings:
        if holding is None:
            return True
        expected |= holding.expected
        for name, box in holding.boxes.items():
            boxes.setdefault(name, set()).add(box)
    return bool(expected) and incomplete(expected, boxes) is None


def incomplete(expected: Table, boxes: Mapping[str, Collection[Box]]) -> str | None:
    """Return the name of a tensor that boxes do not cover, or None if they cover all.

    Args:
        expected: All tensors of the state.
        boxes: Boxes by name of the tensor. They may overlap, as those of two groups of different size do.
    """
    for name, spec in expected.items():
        # In their order, shards leave one box at a time, instead of one for each gap.
        if without(whole_box(spec.shape), sorted(boxes.get(name, ()))):
            return name
    return None


def part_of(tensor: Tensor, box: Box, part: Box) -> Tensor:
    """Return the elements of a part of a box as a view, given the elements of the box."""
    begins = zip(box[0], *part, strict=True)
    return tensor[tuple(slice(low - begin, low - begin + size) for begin, low, size in begins)]


def copy_overlap(box: Box, source: Tensor, target: Piece) -> None:
    """Copy the elements that two pieces of a tensor have in common.

    Args:
        box: Box of the source.
        source: Elements of that box.
        target: Piece that receives the elements.
    """
    if (common := intersection(box, target.box)) is not None:
        part_of(target.tensor, target.box, common).copy_(part_of(source, box, common))


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that a checkpoint or a snapshot names, such as "float32".

    Raises:
        CheckpointError: Torch does not have that dtype.
    """
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"a checkpoint has the dtype {name!r}, which the installed torch lacks; use the version of torch that wrote it"
        )
    return dtype
