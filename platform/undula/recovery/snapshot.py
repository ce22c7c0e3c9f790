"""Snapshots: the state of a run in the memory of its nodes, in files that outlive the worker that writes them.

A rank that writes them has two slots in `/dev/shm`, written in turn, so that one is whole whenever the writer is killed. A slot is
`data`, the bytes of what the rank holds of each tensor, one after another, and `meta.json`, which is taken away before the bytes
change and put back after: without it there is no snapshot. Nothing is unpickled.
"""

import json
import mmap
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from undula.state.defaults import MEMORY
from undula.state.pieces import Holding, Piece, RankState, TensorSpec, dtype_named
from undula.state.records import StepRow

FORMAT = 3
Age = tuple[int, int]
"""(attempt, steps): what a later attempt has is the run, even where an earlier one had come further."""
NEVER: Age = (-1, -1)
FREE_SHARE = 0.5
"""Of the memory that is free, at most this goes to snapshots."""
ROWS_KNOWN = 4096
CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Where versions 2 and 1 say what a container may have, what it has, and which files of that could go."""


class Arrangement:
    """Where a rank's tensors lie in a snapshot's bytes.

    Attributes:
        places: by name: type, shape of the whole tensor, offsets and sizes of the piece, whether all ranks have it, first byte.
        bytes: size of all together.
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
                "replicated": piece.is_replicated,
                "at": self.bytes,
            }
            self.bytes += -(-piece.tensor.nbytes // 64) * 64

    def views(self, buffer: mmap.mmap | bytearray) -> list[Tensor]:
        """Tensors over a buffer's bytes, in the same order."""
        return [_view(buffer, place) for place in self.places.values()]


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot of one rank."""

    meta: Mapping[str, Any]
    data: Path | bytearray
    """The tensors' bytes, or the file that has them."""
    origin: str = "the memory of a node"
    """In words."""

    def as_bytes(self) -> bytes:
        """The meta, to be sent."""
        return json.dumps(self.meta).encode()

    @property
    def age(self) -> Age:
        return int(self.meta["attempt"]), int(self.meta["step"])

    @property
    def plan_digest(self) -> str:
        return str(self.meta["plan_digest"])

    @property
    def rows(self) -> tuple[StepRow, ...]:
        """Rows of the ledger that may not have reached storage."""
        return tuple(StepRow(**row) for row in self.meta["rows"])

    @property
    def holding(self) -> Holding | None:
        """What the rank had; None where it had all of the state."""
        return self._state(
            lambda place: torch.empty(place["sizes"], dtype=dtype_named(place["dtype"]), device="meta")
        ).holding

    def load_bytes(self) -> bytearray:
        return bytearray(self.data.read_bytes()) if isinstance(self.data, Path) else self.data

    def load(self) -> RankState:
        """What the rank had; the tensors are copies of a file's bytes, and views of others."""
        buffer = self.load_bytes()
        return self._state(lambda place: _view(buffer, place))

    def _state(self, tensor_at: Callable[[Mapping[str, Any]], Tensor]) -> RankState:
        pieces = {
            name: Piece(tensor_at(place), tuple(place["shape"]), tuple(place["offsets"]), place["replicated"])
            for name, place in self.meta["tensors"].items()
        }
        elsewhere = {name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in self.meta["elsewhere"].items()}
        return RankState(pieces, self.meta["values"], elsewhere)


def folder_of(run_url: str, run_id: str) -> Path:
    """Where a node keeps a run's snapshots."""
    digest = blake2b(f"{run_url} {run_id}".encode(), digest_size=8).hexdigest()
    return MEMORY / f"undula-{os.getuid()}" / digest


def is_private(folder: Path) -> bool:
    """Whether nobody else could have put anything into a folder of `folder_of`, or will: all users may write to what is above it."""
    try:
        found = folder.parent.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def available_memory() -> int:
    """Memory in bytes that a process can still allocate: that of the machine, or of its control group if that is less."""
    found = [int(psutil.virtual_memory().available)]
    for folder, limit, used, cached in CONTROL_GROUPS:
        with suppress(OSError, ValueError):  # another version's, or without a limit
            (reclaimable,) = re.findall(rf"^{cached} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            found.append(int((folder / limit).read_text()) - int((folder / used).read_text()) + int(reclaimable))
    return max(min(found), 0)


def find_snapshots(folder: Path, plan_digest: str) -> list[Snapshot]:
    """The whole snapshots of a plan below a folder of this node's memory."""
    found = []
    for file in folder.rglob("meta.json"):
        try:
            snapshot = parsed(file.read_bytes(), file.with_name("data"))
        except (OSError, ValueError):
            continue
        if snapshot.plan_digest == plan_digest:
            found.append(snapshot)
    return found


def parsed(meta: bytes, data: Path | bytearray, origin: str = "the memory of a node") -> Snapshot:
    """A snapshot from what was written or sent of it; ValueError where it is another version's."""
    tree = json.loads(meta)
    if tree.get("format") != FORMAT:
        raise ValueError("a snapshot of another version")
    return Snapshot(tree, data, origin)


def packed(plan_digest: str, age: Age, held: RankState, rows: Sequence[StepRow]) -> tuple[bytes, bytearray]:
    """The meta and the bytes of a snapshot, to be sent."""
    arrangement = Arrangement(held.pieces)
    data = bytearray(arrangement.bytes)
    for view, piece in zip(arrangement.views(data), held.pieces.values(), strict=True):
        view.copy_(piece.tensor)
    return encoded(fixed_meta(plan_digest, age[0], arrangement, held), age[1], rows), data


def fixed_meta(plan_digest: str, attempt: int, arrangement: Arrangement, held: RankState) -> bytes:
    """What the snapshots of a worker group have in common, as JSON."""
    fixed = {
        "format": FORMAT,
        "plan_digest": plan_digest,
        "attempt": attempt,
        "values": held.values,
        "elsewhere": {name: [spec.dtype, spec.shape] for name, spec in held.elsewhere.items()},
        "tensors": arrangement.places,
    }
    return json.dumps(fixed).encode()


def encoded(fixed: bytes, step: int, rows: Sequence[StepRow]) -> bytes:
    """The meta of a snapshot, as JSON."""
    return b'{"step": %d, "rows": [%s], %s' % (step, b", ".join(map(_as_json, rows)), fixed[1:])


@lru_cache(ROWS_KNOWN)  # a row is in many snapshots, one after another
def _as_json(row: StepRow) -> bytes:
    return json.dumps(asdict(row)).encode()


def _view(buffer: mmap.mmap | bytearray, place: Mapping[str, Any]) -> Tensor:
    dtype, sizes = dtype_named(place["dtype"]), place["sizes"]
    count = prod(sizes)
    if not count:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=place["at"]).view(sizes)
