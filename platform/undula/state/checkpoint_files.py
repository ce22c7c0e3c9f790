"""The files of a checkpoint: safetensors for a rank's share of the tensors, and the table of what lies where."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from undula.errors import CheckpointError
from undula.state.commit import Commit
from undula.state.pieces import Box, Piece, Table, TensorSpec, copy_overlap, overlaps
from undula.storage import Store

Claim = tuple[str, Box, int]
"""A piece that a rank has: name of the tensor, box, and bytes."""


@dataclass(frozen=True)
class WrittenFile:
    """A file that a rank has written."""

    name: str
    bytes: int
    sha256: str
    chunks: Mapping[str, Box]
    """Boxes in the file, by name of the tensor."""


def shares(claims: Sequence[Sequence[Claim]]) -> list[list[str]]:
    """Names of the tensors of which each rank writes its piece: every box once, spread over the ranks that have it by bytes.

    Args:
        claims: pieces of each rank.
    """
    owners: dict[tuple[str, Box], list[int]] = {}
    sizes: dict[tuple[str, Box], int] = {}
    for rank, of_rank in enumerate(claims):
        for name, box, num_bytes in of_rank:
            owners.setdefault((name, box), []).append(rank)
            sizes[name, box] = num_bytes
    loads = [0] * len(claims)
    found: list[list[str]] = [[] for _ in claims]
    # Those that only one rank has come first, then the largest: what can be moved evens out the rest.
    for name, box in sorted(owners, key=lambda each: (len(owners[each]) > 1, -sizes[each], each)):
        rank = min(owners[name, box], key=lambda rank: (loads[rank], rank))
        loads[rank] += sizes[name, box]
        found[rank].append(name)
    return found


def write_share(store: Store, folder: str, rank: int, pieces: Mapping[str, tuple[Tensor, Box]]) -> WrittenFile | None:
    """Write a rank's share as one file; None where it has none.

    Args:
        pieces: elements in host memory and their box, by name of the tensor.
    """
    if not pieces:
        return None
    name = f"rank-{rank:05d}.safetensors"
    data = safetensors.torch.save({key: _as_real(tensor) for key, (tensor, _) in pieces.items()})
    store.write(f"{folder}/{name}", data)
    return WrittenFile(name, len(data), sha256(data).hexdigest(), {key: box for key, (_, box) in pieces.items()})


def tensors_entry(table: Table, files: Iterable[WrittenFile]) -> dict[str, Any]:
    """The entry `tensors` of a `commit.json`: for each tensor its type, its shape, and the places of its boxes."""
    entry: dict[str, Any] = {
        name: {"dtype": spec.dtype, "shape": list(spec.shape), "chunks": []} for name, spec in table.items()
    }
    for file in files:
        for name, (offsets, sizes) in file.chunks.items():
            chunk = {"offsets": list(offsets), "sizes": list(sizes), "file": file.name, "key": name}
            entry[name]["chunks"].append(chunk)
    return entry


def table_of(commit: Commit) -> dict[str, TensorSpec]:
    """The tensors of a checkpoint."""
    return {name: TensorSpec(saved["dtype"], tuple(saved["shape"])) for name, saved in commit.tensors.items()}


def read_pieces(store: Store, commit: Commit, targets: Mapping[str, Piece]) -> None:
    """Fill pieces with what a checkpoint has of them, file by file.

    Raises:
        CheckpointError: the checkpoint lacks a tensor, or has it in another shape.
    """
    wanted: dict[str, list[tuple[str, str, Box]]] = {}
    for name, target in targets.items():
        saved = commit.tensors.get(name)
        if saved is None or tuple(saved["shape"]) != target.shape:
            raise CheckpointError(f"{commit.folder} does not fit: {name!r} is missing or has another shape")
        for chunk in saved["chunks"]:
            box = tuple(chunk["offsets"]), tuple(chunk["sizes"])
            if overlaps(box, target.box):
                wanted.setdefault(chunk["file"], []).append((name, chunk["key"], box))
    for file, chunks in sorted(wanted.items()):
        try:
            tensors = safetensors.torch.load(store.read(f"{commit.folder}/{file}"))
            for name, key, box in chunks:
                stored, target = tensors[key], targets[name]
                stored = torch.view_as_complex(stored) if target.tensor.is_complex() else stored
                copy_overlap(box, stored.view(box[1]), target)
        except (safetensors.SafetensorError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{store.url}/{commit.folder}/{file} cannot be loaded: {error}") from error


def _as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, because safetensors has no type for all of them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
