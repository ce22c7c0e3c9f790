"""Files of a checkpoint: the safetensors file with a rank's share of the tensors, and the table of where each box lies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

import torch
from torch import Tensor

from undula.errors import CheckpointError, one_line
from undula.state.boxes import Box, elements, intersection
from undula.state.commit import Commit
from undula.state.extents import Extent, Kinds, Names
from undula.state.pieces import Piece, Table, TensorSpec, as_real, copy_overlap, dtype_named, incomplete
from undula.state.tensor_file import TensorFile, file_buffers
from undula.storage import Store

Entries: TypeAlias = "Callable[[Sequence[WrittenFile]], dict[str, Any]]"
"""Function that returns the entry `tensors` of a `commit.json` for the files of all ranks."""


@dataclass(frozen=True)
class WrittenFile:
    """File of a checkpoint that a rank has written."""

    name: str
    bytes: int
    sha256: str
    chunks: Mapping[str, Box]
    """Box of each tensor in the file, by name of the tensor."""


def share_of(rank: int, extents: Sequence[Extent], names: Names) -> list[str]:
    """Return the names of the tensors whose pieces a rank writes, so that each box is written once, and ranks write similar sizes.

    Args:
        rank: Number of the rank.
        extents: Extents of the pieces of all ranks.
        names: Names of the tensors.
    """
    kinds = Kinds(extents, names)
    own: list[str] = []
    loads = [0] * len(extents)
    shared: list[tuple[int, str, Box, list[int]]] = []
    owners: dict[tuple[str, Box], list[int]] = {}
    specs: dict[str, TensorSpec] = {}
    for number, extent in enumerate(extents):
        holding = kinds.holding(extent)
        specs |= holding.expected
        for first, box in holding.boxes.items():
            owners.setdefault((first, box), []).append(number)
    for (first, box), ranks in owners.items():
        size, members = elements(box) * dtype_named(specs[first].dtype).itemsize, kinds.members[first]
        if len(ranks) > 1:
            shared += [(-size, name, box, ranks) for name in members]
            continue
        loads[ranks[0]] += size * len(members)
        own += members if ranks[0] == rank else []
    # The largest ones come first, so that those with a choice of ranks even out the loads.
    for size, name, _, ranks in sorted(shared):
        least = min(ranks, key=lambda each: (loads[each], each))
        loads[least] -= size
        own += [name] if least == rank else []
    return own


def write_share(store: Store, folder: str, rank: int, pieces: Mapping[str, tuple[Tensor, Box]]) -> WrittenFile | None:
    """Write a rank's share of a checkpoint as one file.

    Args:
        store: Run directory.
        folder: Folder of the checkpoint in the run directory.
        rank: Number of the rank.
        pieces: Elements in host memory and their box, by name of the tensor.

    Returns:
        Description of the file; None if the share is empty and no file was written.
    """
    if not pieces:
        return None
    name = f"rank-{rank:05d}.safetensors"
    buffers = file_buffers({key: as_real(tensor) for key, (tensor, _) in pieces.items()})
    store.write_buffers(f"{folder}/{name}", buffers)
    digest = sha256()
    for buffer in buffers:
        digest.update(buffer)
    num_bytes = sum(len(buffer) for buffer in buffers)
    return WrittenFile(name, num_bytes, digest.hexdigest(), {key: box for key, (_, box) in pieces.items()})


def tied_names(pieces: Mapping[str, Piece]) -> dict[str, str]:
    """Return the names of pieces that are the same memory as an earlier one, each with the name of that one."""
    first: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, piece in pieces.items():
        tensor = piece.tensor
        memory = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            piece.shape,
            piece.offsets,
        )
        if tensor.numel() and (known := first.setdefault(memory, name)) != name:
            tied[name] = known
    return tied


def tensors_entry(table: Table, tied: Mapping[str, str], files: Iterable[WrittenFile]) -> dict[str, Any]:
    """Return the entry `tensors` of a `commit.json`: the dtype, the shape, the strides and the boxes of each tensor, by name.

    Args:
        table: Tensors of the state.
        tied: Names of tensors that are stored under another name only, with that name.
        files: Files of the ranks.

    Raises:
        CheckpointError: The files have a tensor that is not in the table, or only a part of a tensor.
    """
    entry: dict[str, Any] = {
        name: {"dtype": spec.dtype, "shape": spec.shape, "strides": spec.strides, "chunks": []}
        for name, spec in table.items()
    }
    stored = {name: spec for name, spec in table.items() if name not in tied}
    boxes: dict[str, list[Box]] = {}
    for file in files:
        for name, (offsets, sizes) in file.chunks.items():
            if name not in entry:
                raise CheckpointError(
                    f"{file.name} has {name!r}, which rank 0 lacks; all ranks must have the same state"
                )
            chunk = {"offsets": list(offsets), "sizes": list(sizes), "file": file.name, "key": name}
            entry[name]["chunks"].append(chunk)
            boxes.setdefault(name, []).append((offsets, sizes))
    if lacking := incomplete(stored, boxes):
        raise CheckpointError(f"the ranks do not hold all of {lacking!r}; together, they must hold the whole state")
    return entry | {name: entry[first] for name, first in tied.items()}


def table_of(commit: Commit) -> dict[str, TensorSpec]:
    """Return the description of the tensors of a checkpoint, by name."""
    return {
        name: TensorSpec(
            saved["dtype"], tuple(saved["shape"]), tuple(saved["strides"]) if saved.get("strides") is not None else None
        )
        for name, saved in commit.tensors.items()
    }


def read_pieces(store: Store, commit: Commit, targets: Mapping[str, Piece]) -> None:
    """Fill pieces from a checkpoint, file by file.

    Raises:
        CheckpointError: The checkpoint lacks a tensor, has it with another shape, or has a file that cannot be loaded.
    """
    wanted: dict[str, list[tuple[str, str, Box]]] = {}
    for name, target in targets.items():
        saved = commit.tensors.get(name)
        if saved is None or tuple(saved["shape"]) != target.shape:
            raise CheckpointError(
                f"{commit.folder} is from another model or optimizer: it lacks {name!r} or has it with another shape"
            )
        missing = target.tensor.numel()
        for chunk in saved["chunks"]:
            box = tuple(chunk["offsets"]), tuple(chunk["sizes"])
            if common := intersection(box, target.box):
                wanted.setdefault(chunk["file"], []).append((name, chunk["key"], box))
                missing -= elements(common)
        if missing:
            raise CheckpointError(f"{commit.folder} lacks a part of {name!r}; delete this checkpoint")
    for file, chunks in sorted(wanted.items()):
        try:
            source = TensorFile(store, f"{commit.folder}/{file}")
            for name, key, box in sorted(chunks, key=lambda chunk: source.position(chunk[1])):
                stored, target = source.read(key), targets[name]
                stored = torch.view_as_complex(stored) if target.tensor.is_complex() else stored
                copy_overlap(box, stored.view(box[1]), target)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{store.url}/{commit.folder}/{file} cannot be loaded: {one_line(error)}") from error
