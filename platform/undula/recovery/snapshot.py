"""Snapshots: copies of a run's state in the memory of its nodes, in files that outlive the worker that writes them.

A rank that writes snapshots has two slots in `/dev/shm` and writes them in turn, so that one of them is whole whenever the rank is killed.
A slot has two files: `data`, with the bytes of the rank's pieces one after another, and `meta.json`, which describes them. The rank deletes
`meta.json` before it changes the bytes and writes it again afterwards; a slot without `meta.json` has no snapshot. Nothing is unpickled.
Each attempt has slots of its own, so that the snapshots of the former attempt stay until all ranks have stored one of the new attempt, and
a process of the former attempt that is still alive cannot change those of the new one.
"""

import json
import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from undula.state.boxes import Box
from undula.state.defaults import MEMORY
from undula.state.pieces import Holding, Piece, RankState, Table, TensorSpec, dense_strides, dtype_named
from undula.state.records import StepRow

FORMAT = 5
Age = tuple[int, int]
"""(attempt, steps) of a state. The state of a later attempt is newer, even if an earlier attempt had committed more steps."""
NEVER: Age = (-1, -1)
"""Age that is older than that of any state."""
SLOTS = ("a", "b")
"""Names of the two places in which a rank writes its snapshots in turn."""
UPDATE_SLOTS = tuple(f"update-{number}" for number in range(8))
"""Names of the places in which a rank of a sharded model records its last updates in turn."""
PLACE = "place"
"""File in the folder of a rank of a sharded model, in which it notes how far the script has come."""
DATA, META = "data", "meta.json"
"""Files of a slot: the bytes of the pieces, and the description of the bytes."""
ROWS_KNOWN = 4096
"""Number of rows of the ledger whose JSON is cached."""
CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Sources of a container's memory limit, for versions 2 and 1 of control groups: the folder, the file with the limit, the file with the
memory in use, and the key in memory.stat of the part of that memory that can be reclaimed."""


class Arrangement:
    """Layout of a rank's pieces in the bytes of a snapshot.

    Attributes:
        places: Description of each piece by name: dtype, shape of the whole tensor, offsets, sizes and strides of the piece, whether
            all ranks hold the same piece, and position of its first byte.
        bytes: Total number of bytes.
    """

    def __init__(self, pieces: Mapping[str, Piece]):
        self.places: dict[str, dict[str, Any]] = {}
        self.bytes = 0
        for name, piece in pieces.items():
            self.places[name] = {
                "dtype": str(piece.tensor.dtype).removeprefix("torch."),
                "shape": list(piece.shape),
                "offsets": list(piece.offsets),
                "sizes": list(piece.tensor.shape),
                "strides": list(dense_strides(piece.tensor)),
                "replicated": piece.is_replicated,
                "at": self.bytes,
            }
            self.bytes += aligned_bytes(piece.tensor)

    def views(self, buffer: mmap.mmap | bytearray) -> list[Tensor]:
        """Return tensors that view the bytes of a buffer, in the order of `places`."""
        return [_view(buffer, place) for place in self.places.values()]


def aligned_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a snapshot, where each begins at a multiple of 64."""
    return -(-tensor.numel() * tensor.itemsize // 64) * 64


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot of one rank."""

    meta: Mapping[str, Any]
    """Content of `meta.json`."""
    data: Path | bytearray
    """Bytes of the pieces, or the file that has them."""
    origin: str = "the memory of a node"
    """Place of the snapshot, for messages."""

    @property
    def age(self) -> Age:
        return int(self.meta["attempt"]), int(self.meta["step"])

    @property
    def folder(self) -> Path | None:
        """Folder of the rank that has written the snapshot, on this node; None if it was received."""
        return self.data.parents[1] if isinstance(self.data, Path) else None

    @property
    def plan_digest(self) -> str:
        return str(self.meta["plan_digest"])

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of the state that are not tensors, by name."""
        values: Mapping[str, Any] = self.meta["values"]
        return values

    @property
    def rows(self) -> tuple[StepRow, ...]:
        """Rows of the ledger that may not have reached storage."""
        return tuple(StepRow(**row) for row in self.meta["rows"])

    @property
    def holding(self) -> Holding | None:
        """Extent of the rank's pieces; None if the rank held the whole state."""
        expected: dict[str, TensorSpec] = {}
        boxes: dict[str, Box] = {}
        for name, place in self.meta["tensors"].items():
            shape, sizes = tuple(place["shape"]), tuple(place["sizes"])
            expected[name] = TensorSpec(place["dtype"], shape, tuple(place["strides"]) if sizes == shape else None)
            boxes[name] = tuple(place["offsets"]), sizes
        is_whole = not self._others and all(sizes == expected[name].shape for name, (_, sizes) in boxes.items())
        return None if is_whole else Holding(expected | self._others, boxes)

    @property
    def _others(self) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec(dtype, tuple(shape), None if strides is None else tuple(strides))
            for name, (dtype, shape, strides) in self.meta["others"].items()
        }

    @property
    def shards(self) -> set[str]:
        """Names of the tensors of which the rank had a shard."""
        return {name for name, place in self.meta["tensors"].items() if not place["replicated"]}

    @property
    def bytes(self) -> int:
        """Size of the data in bytes."""
        return self.data.stat().st_size if isinstance(self.data, Path) else len(self.data)

    def load_bytes(self) -> bytearray:
        return bytearray(self.data.read_bytes()) if isinstance(self.data, Path) else self.data

    def load(self) -> RankState:
        """Return the rank's state. If the snapshot is in a file, its tensors are copies; otherwise, they are views of `data`."""
        buffer = self.load_bytes()
        pieces = {
            name: Piece(_view(buffer, place), tuple(place["shape"]), tuple(place["offsets"]), place["replicated"])
            for name, place in self.meta["tensors"].items()
        }
        return RankState(pieces, self.values, self._others)


def folder_of(run_url: str, run_id: str) -> Path:
    """Return the folder in which a node keeps the snapshots of a run."""
    digest = blake2b(f"{run_url} {run_id}".encode(), digest_size=8).hexdigest()
    return MEMORY / f"undula-{os.getuid()}" / digest


def is_private(folder: Path) -> bool:
    """Return whether only this user can write to the parent of a folder from `folder_of`.

    The parent itself could have been made by another user, because all users can write to the file system that it is in.
    """
    try:
        state = folder.parent.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(state.st_mode)
        and state.st_uid == os.getuid()
        and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def available_memory() -> int:
    """Return the bytes of memory that a process can still allocate: those of the machine, or of its control group if that has less."""
    available = [int(psutil.virtual_memory().available)]
    for folder, limit, used, cached in CONTROL_GROUPS:
        with suppress(OSError, ValueError):  # the machine uses the other version, or sets no limit
            (reclaimable,) = re.findall(rf"^{cached} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            available.append(int((folder / limit).read_text()) - int((folder / used).read_text()) + int(reclaimable))
    return max(min(available), 0)


def slots_below(folder: Path) -> Iterator[Path]:
    """Yield the slots below a folder. Other processes may delete some of them at the same time."""
    return (Path(path) for path, _, _ in os.walk(folder) if Path(path).name in (*SLOTS, *UPDATE_SLOTS))


def find_snapshots(folder: Path, plan_digest: str, names: Sequence[str] = SLOTS) -> list[Snapshot]:
    """Find the complete snapshots of a plan below a folder in the memory of this node, in slots with these names."""
    snapshots = []
    for slot in slots_below(folder):
        if slot.name not in names:
            continue
        try:
            snapshot = parsed((slot / META).read_bytes(), slot / DATA)
        except (OSError, ValueError):
            continue
        if snapshot.plan_digest == plan_digest:
            snapshots.append(snapshot)
    return snapshots


def parsed(meta: bytes, data: Path | bytearray, origin: str = "the memory of a node") -> Snapshot:
    """Return the snapshot that a stored or received meta describes.

    Raises:
        ValueError: The snapshot has the format of another version.
    """
    tree = json.loads(meta)
    if tree.get("format") != FORMAT:
        raise ValueError("the snapshot has the format of another version")
    return Snapshot(tree, data, origin)


def packed(plan_digest: str, age: Age, held: RankState, rows: Sequence[StepRow]) -> tuple[bytes, bytearray]:
    """Return the meta and the bytes of a snapshot of a state, for sending."""
    arrangement = Arrangement(held.pieces)
    data = bytearray(arrangement.bytes)
    for view, piece in zip(arrangement.views(data), held.pieces.values(), strict=True):
        view.copy_(piece.tensor)
    return encoded(fixed_meta(plan_digest, arrangement, held.others), age, rows, held.values), data


def fixed_meta(plan_digest: str, arrangement: Arrangement, others: Table | None = None) -> bytes:
    """Return the part of the meta that stays the same while the tensors of a state lie in the same way, as JSON.

    Args:
        plan_digest: Digest of the run's plan.
        arrangement: Places of the tensors.
        others: Tensors of the state that the snapshot lacks, because other ranks have all of them.
    """
    fixed = {
        "format": FORMAT,
        "plan_digest": plan_digest,
        "tensors": arrangement.places,
        "others": {name: (spec.dtype, spec.shape, spec.strides) for name, spec in (others or {}).items()},
    }
    return json.dumps(fixed).encode()


def encoded(fixed: bytes, age: Age, rows: Sequence[StepRow], values: Mapping[str, Any]) -> bytes:
    """Return the meta of a snapshot as JSON: its age, its rows, the values of its state and the fixed part."""
    changing = json.dumps({"attempt": age[0], "step": age[1], "values": values}).encode()
    return b'%s, "rows": [%s], %s' % (changing[:-1], b", ".join(map(_as_json, rows)), fixed[1:])


@lru_cache(ROWS_KNOWN)  # consecutive snapshots include the same rows
def _as_json(row: StepRow) -> bytes:
    return json.dumps(asdict(row)).encode()


def _view(buffer: mmap.mmap | bytearray, place: Mapping[str, Any]) -> Tensor:
    dtype, sizes = dtype_named(place["dtype"]), place["sizes"]
    count = prod(sizes)
    if not count:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=place["at"]).as_strided(sizes, place["strides"])


def state_bytes(held: RankState, group: dist.ProcessGroup) -> int:
    """Return the number of bytes that all ranks together send as a replica of a state. All ranks must call this together.

    Args:
        held: Part of the state that this rank holds.
        group: Process group of the ranks, which must support CPU tensors.
    """
    num_bytes = torch.tensor(held.bytes, device="cpu")
    if not held.is_whole:
        dist.all_reduce(num_bytes, group=group)
    return int(num_bytes)
