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
"""Function that returns the entries `tensors` and `chunks` of a `commit.json` for the files of all ranks."""


@dataclass(frozen=True)
class WrittenFile:
    """File of a checkpoint that a rank has written."""

    name: str
    bytes: int
    sha256: str
    extent: Extent
    """Extent of the pieces in the file."""


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


def write_share(
    store: Store, folder: str, rank: int, tensors: Mapping[str, Tensor], extent: Extent
) -> WrittenFile | None:
    """Write a rank's share of a checkpoint as one file.

    Args:
        store: Run directory.
        folder: Folder of the checkpoint in the run directory.
        rank: Number of the rank.
        tensors: Elements of the pieces in host memory, by name.
        extent: Extent of the pieces.

    Returns:
        Description of the file; None if the share is empty and no file was written.
    """
    if not tensors:
        return None
    name = f"rank-{rank:05d}.safetensors"
    buffers = file_buffers({key: as_real(tensor) for key, tensor in tensors.items()})
    store.write_buffers(f"{folder}/{name}", buffers)
    digest = sha256()
    for buffer in buffers:
        digest.update(buffer)
    num_bytes = sum(len(buffer) for buffer in buffers)
    return WrittenFile(name, num_bytes, digest.hexdigest(), extent)


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


def entries_of(table: Table, tied: Mapping[str, str], names: Names, files: Sequence[WrittenFile]) -> dict[str, Any]:
    """Return the entries `tensors` and `chunks` of a `commit.json`, as `Commit` has them.

    Args:
        table: Tensors of the state.
        tied: Names of tensors that are stored under another name only, with that name.
        names: Names of the tensors in the files.
        files: Files of the ranks.

    Raises:
        CheckpointError: The files have a tensor that is not in the table, or only a part of a tensor.
    """
    for file in files:
        if unknown := set(names[file.extent.names]) - set(table):
            raise CheckpointError(
                f"{file.name} has {min(unknown)!r}, which rank 0 lacks; all ranks must have the same state"
            )
    kinds = Kinds((file.extent for file in files), names)
    boxes: dict[str, list[tuple[str, Box]]] = {}
    for file in files:
        for first, box in kinds.holding(file.extent).boxes.items():
            boxes.setdefault(first, []).append((file.name, box))
    chunks: dict[tuple[tuple[str, Box], ...], int] = {}
    entry: dict[str, Any] = {}
    for name, spec in table.items():
        key = tied.get(name, name)
        of_kind = boxes.get(kinds.first_of.get(key, ""), [])
        place = tuple((file, box) for file, box in of_kind if elements(box))
        if place not in chunks and incomplete({name: spec}, {name: [box for _, box in of_kind]}):
            raise CheckpointError(f"the ranks do not hold all of {key!r}; together, they must hold the whole state")
        number = chunks.setdefault(place, len(chunks))
        entry[name] = {"dtype": spec.dtype, "shape": spec.shape, "strides": spec.strides, "key": key, "chunks": number}
    return {"tensors": entry, "chunks": [[[file, *box] for file, box in place] for place in chunks]}


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
    for file, chunks in sorted(wanted_chunks(commit, targets).items()):
        try:
            source = TensorFile(store, f"{commit.folder}/{file}")
            for name, key, box in sorted(chunks, key=lambda chunk: source.position(chunk[1])):
                stored, target = source.read(key), targets[name]
                stored = torch.view_as_complex(stored) if target.tensor.is_complex() else stored
                copy_overlap(box, stored.view(box[1]), target)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{store.url}/{commit.folder}/{file} cannot be loaded: {one_line(error)}") from error


def wanted_chunks(commit: Commit, targets: Mapping[str, Piece]) -> dict[str, list[tuple[str, str, Box]]]:
    """Return what each file of a checkpoint has of some pieces: the name of the piece, the key in the file, and the box that lies there.

    Raises:
        CheckpointError: The checkpoint lacks a tensor or a part of one, or has it with another shape.
    """
    wanted: dict[str, list[tuple[str, str, Box]]] = {}
    overlaps: dict[tuple[int, Box], list[tuple[str, Box, int]]] = {}
    for name, target in targets.items():
        saved = commit.tensors.get(name)
        if saved is None or tuple(saved["shape"]) != target.shape:
            raise CheckpointError(
                f"{commit.folder} is from another model or optimizer: it lacks {name!r} or has it with another shape"
            )
        place = saved["chunks"], target.box
        if place not in overlaps:
            overlaps[place] = _overlaps(commit.chunks[place[0]], target.box)
        for file, box, _ in overlaps[place]:
            wanted.setdefault(file, []).append((name, saved["key"], box))
        if sum(count for *_, count in overlaps[place]) < target.tensor.numel():
            raise CheckpointError(f"{commit.folder} lacks a part of {name!r}; delete this checkpoint")
    return wanted


def _overlaps(chunks: Iterable[Any], wanted: Box) -> list[tuple[str, Box, int]]:
    """Return the file, the box and the number of common elements of each chunk that has a part of a box."""
    boxes = ((file, (tuple(offsets), tuple(sizes))) for file, offsets, sizes in chunks)
    common = ((file, box, intersection(box, wanted)) for file, box in boxes)
    return [(file, box, elements(part)) for file, box, part in common if part]
