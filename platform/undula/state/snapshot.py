"""Snapshots: the state of a run in the memory of its nodes, in files that outlive the worker that writes them.

A node holds two slots in `/dev/shm`, written in turn, so that one is whole whenever the writer is killed. A slot is `data`, the
tensors' bytes one after another, and `meta.json`, which is taken away before the bytes change and put back after: without it there
is no snapshot. Nothing is unpickled.
"""

import json
import math
import mmap
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undula.state.ledger import StepRow

MEMORY = Path("/dev/shm")
Age = tuple[int, int]
"""(attempt, steps): what a later attempt has is the run, even where an earlier one had come further."""
MirrorTo = Callable[[Mapping[str, Any], memoryview], None]
COST = 0.01
"""Share of a step's time that snapshots may take."""
SETTLED = 8
"""Snapshots after which their cost is known."""
KEPT_S = 86_400.0
"""A run that is not finished may be gone on with for so long after its last snapshot."""
FREE_SHARE = 0.5
"""Of the memory that is free, at most this goes to snapshots."""


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot."""

    meta: Mapping[str, Any]
    data: Path | bytearray
    """The tensors' bytes, or the file that has them."""
    origin: str = "the memory of a node"
    """In words."""

    @property
    def age(self) -> Age:
        return int(self.meta.get("attempt", 0)), self.step

    @property
    def step(self) -> int:
        """Steps that are in it."""
        return int(self.meta["step"])

    @property
    def rows(self) -> tuple[StepRow, ...]:
        """Rows of the ledger that may not have reached storage."""
        return tuple(StepRow(**row) for row in self.meta["rows"])

    def load(self) -> dict[str, Any]:
        """Tensors and values by name; the tensors are copies of a file's bytes, and views of others."""
        bytes_ = bytearray(self.data.read_bytes()) if isinstance(self.data, Path) else self.data
        state: dict[str, Any] = dict(self.meta["values"])
        for name, place in self.meta["tensors"].items():
            dtype = getattr(torch, place["dtype"])
            count = math.prod(place["shape"])
            state[name] = (
                torch.frombuffer(bytes_, dtype=dtype, count=count, offset=place["offset"]).view(place["shape"])
                if count
                else torch.empty(place["shape"], dtype=dtype)
            )
        return state


def folder_of(run_url: str, run_id: str) -> Path:
    """Where a node keeps a run's snapshots."""
    digest = blake2b(f"{run_url} {run_id}".encode(), digest_size=8).hexdigest()
    return MEMORY / f"undula-{os.getuid()}" / digest


def available_memory() -> int:
    """Bytes of this machine's memory that a process can still have."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) * 2**10


def newest_snapshot(folder: Path, plan_digest: str) -> Snapshot | None:
    """The newest whole snapshot of a plan in this node's memory."""
    found = []
    for slot in ("a", "b"):
        try:
            meta = json.loads((folder / slot / "meta.json").read_bytes())
        except (OSError, ValueError):
            continue
        if meta["plan_digest"] == plan_digest:
            found.append(Snapshot(meta, folder / slot / "data"))
    return max(found, key=lambda snapshot: snapshot.age, default=None)


class SnapshotWriter:
    """Takes snapshots of one model and optimizer, in a thread, while the next step computes its gradients.

    Between two steps of the optimizer nothing changes the tensors, but for buffers, which are copied at once.

    Args:
        folder: of this run, on this node.
        plan_digest: identity of its plan.
        attempt: of this group.
        every_steps: interval; by default by what they cost.
        mirror: gets each snapshot's meta and bytes, in the thread, and copies what it wants of them.
    """

    def __init__(
        self,
        folder: Path,
        plan_digest: str,
        attempt: int = 0,
        every_steps: int | None = None,
        mirror: MirrorTo | None = None,
    ):
        self._folder = folder
        self._plan_digest = plan_digest
        self._attempt = attempt
        self._fixed_interval = every_steps
        self._mirror = mirror
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="undula-snapshot")
        self._taking: Future[float] | None = None
        self._slots: list[_Slot] = []
        self._next = 0
        self._cost_s = 0.0
        self._step_s = 0.0
        self._steps_since: int | None = None
        self._taken = 0
        self.problem: str | None = None
        """Why there are no snapshots."""

    @property
    def bytes(self) -> int:
        """Memory that the snapshots take on this node."""
        return sum(slot.bytes for slot in self._slots)

    @property
    def every_steps(self) -> int:
        """Steps between snapshots, so many that they cost less than COST of the time."""
        if self._fixed_interval is not None:
            return self._fixed_interval
        if not self._cost_s or not self._step_s:
            return 1
        return max(math.ceil(self._cost_s / (COST * self._step_s)), 1)

    def words(self) -> str | None:
        """How often they are taken and what they cost; None before that is known, as the first ones fault their memory in."""
        if self._taken < SETTLED or not self._step_s:
            return None
        steps = "after every step" if self.every_steps == 1 else f"every {self.every_steps} steps"
        share = self._cost_s / (self.every_steps * self._step_s)
        return f"snapshots {steps}, {self.bytes / 2**20:.0f} MiB of each node's memory, {share:.1%} of the time"

    def is_due(self, step_s: float) -> bool:
        """Whether a snapshot is to be taken after a step that took `step_s`; called after each."""
        self._step_s = 0.9 * self._step_s + 0.1 * step_s if self._step_s else step_s
        if self._steps_since is not None:
            self._steps_since += 1
        return self.problem is None and (self._steps_since is None or self._steps_since >= self.every_steps)

    def begin(self, step: int, state: Mapping[str, Any], rows: Sequence[StepRow]) -> None:
        """Begin to copy; `wait()` comes before the tensors change."""
        self.wait()
        self._steps_since = 0
        tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
        if not self._slots and not self._make_slots(tensors):
            return
        slot, self._next = self._slots[self._next], 1 - self._next
        meta = _meta(self._plan_digest, (self._attempt, step), state, rows)
        self._taking = self._thread.submit(slot.write, tensors, meta)
        if self._mirror:
            self._thread.submit(slot.give, self._mirror)

    def wait(self) -> None:
        """Wait until the snapshot under way is whole."""
        if self._taking:
            taking, self._taking = self._taking, None
            try:
                taken_s = taking.result()
            except OSError as error:
                self.problem = str(error)
                return
            self._taken += 1
            self._cost_s = 0.7 * self._cost_s + 0.3 * taken_s if self._cost_s else taken_s

    def forget(self) -> None:
        """Free the memory: the run is over."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Leave the snapshots for whoever comes."""
        self.wait()
        self._thread.shutdown()
        for slot in self._slots:
            slot.close()

    def _make_slots(self, tensors: Mapping[str, Tensor]) -> bool:
        size = _size(tensors)
        try:
            _forget_old(self._folder.parent)
            room = os.statvfs(MEMORY)
            own = sum(file.stat().st_size for file in self._folder.glob("*/data"))
            if 2 * size > FREE_SHARE * (room.f_bavail * room.f_frsize + own):
                self.problem = f"two copies of {size / 2**20:.0f} MiB are more than half of what {MEMORY} has free"
                return False
            newest = newest_snapshot(self._folder, self._plan_digest)
            self._next = int(newest is not None and newest.data == self._folder / "a" / "data")
            self._slots = [_Slot(self._folder / name, size) for name in ("a", "b")]
        except OSError as error:
            self.problem = str(error)
            return False
        return True


class _Slot:
    """One of the two places for a snapshot."""

    def __init__(self, folder: Path, size: int):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._meta: dict[str, Any] | None = None
        self.bytes = size
        descriptor = os.open(folder / "data", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size != max(size, 1):  # of another model
                (folder / "meta.json").unlink(missing_ok=True)
                os.ftruncate(descriptor, 0)
                # Pages that are not there when they are written end the process; here they end the snapshots.
                os.posix_fallocate(descriptor, 0, max(size, 1))
            self._map = mmap.mmap(descriptor, max(size, 1))
        finally:
            os.close(descriptor)

    def write(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> float:
        """Copy the tensors; the seconds that it took."""
        self._meta = None
        began = time.perf_counter()
        (self._folder / "meta.json").unlink(missing_ok=True)
        partial = self._folder / "meta.partial"
        whole = {**meta, "tensors": _copy(tensors, self._map)}
        partial.write_bytes(json.dumps(whole).encode())
        partial.replace(self._folder / "meta.json")
        self._meta = whole
        return time.perf_counter() - began

    def give(self, mirror: MirrorTo) -> None:
        """Let a mirror have what was written."""
        if self._meta is not None and self.bytes:
            mirror(self._meta, memoryview(self._map))

    def close(self) -> None:
        self._map.close()


def packed(
    plan_digest: str, age: Age, state: Mapping[str, Any], rows: Sequence[StepRow]
) -> tuple[dict[str, Any], bytearray]:
    """A snapshot's meta and bytes, to be sent."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    data = bytearray(_size(tensors))
    places = _copy(tensors, data)
    return {**_meta(plan_digest, age, state, rows), "tensors": places}, data


def _meta(plan_digest: str, age: Age, state: Mapping[str, Any], rows: Sequence[StepRow]) -> dict[str, Any]:
    attempt, step = age
    values = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    told = [asdict(row) for row in rows]
    return {"plan_digest": plan_digest, "attempt": attempt, "step": step, "values": values, "rows": told}


def _copy(tensors: Mapping[str, Tensor], buffer: mmap.mmap | bytearray) -> dict[str, Any]:
    """Copy the tensors one after another; where each is."""
    places: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.numel():
            target = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            target.view(tensor.shape).copy_(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        places[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": offset}
        offset += _aligned(tensor.nbytes)
    return places


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors.values())


def _forget_old(folder: Path) -> None:
    """Free the memory of runs that nobody went on with."""
    for slot in folder.glob("*/*") if folder.name.startswith("undula-") else []:
        with suppress(OSError):  # its run may be removing it
            if time.time() - slot.stat().st_mtime > KEPT_S:
                shutil.rmtree(slot.parent, ignore_errors=True)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
