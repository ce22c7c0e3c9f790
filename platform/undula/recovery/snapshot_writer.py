"""Takes snapshots beside the training, as often as costs a hundredth of its time."""

import math
import mmap
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undula.recovery.snapshot import (
    FREE_SHARE,
    Arrangement,
    available_memory,
    encoded,
    find_snapshots,
    fixed_meta,
    is_private,
)
from undula.state.defaults import MEMORY
from undula.state.pieces import RankState
from undula.state.records import StepRow

Send = Callable[[bytes, memoryview], None]
COST = 0.01
"""Largest share of a step's time that snapshots take."""
SETTLED = 8
"""Number of snapshots after which their cost is known."""
KEPT_S = 86_400.0
"""Seconds after its last snapshot at which the memory of an unfinished run is freed."""


class SnapshotWriter:
    """Takes snapshots of what one rank holds, in a thread, while the next step computes its gradients.

    Between two steps of the optimizer nothing changes the tensors except buffers, which the caller copies.

    Args:
        folder: folder of the run on this node.
        plan_digest: identity of the run's plan.
        attempt: number of the attempt.
        local_rank: number of this worker on its node.
        every_steps: steps between snapshots; by default as many as keep their cost below COST.
    """

    def __init__(
        self, folder: Path, plan_digest: str, attempt: int = 0, local_rank: int = 0, every_steps: int | None = None
    ):
        self._folder = folder
        self._own = folder / str(local_rank)
        self._plan_digest = plan_digest
        self._attempt = attempt
        self._fixed_interval = every_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="undula-snapshot")
        self._taking: Future[float] | None = None
        self._held: RankState | None = None
        self._sources: dict[str, Tensor] = {}
        self._fixed_meta = b""
        self._slots: list[_Slot] = []
        self._places: dict[str, dict[str, Any]] = {}
        self._next = 0
        self._cost_s = 0.0
        self._held_up_s = 0.0
        self._step_s = 0.0
        self._steps_since: int | None = None
        self._taken = 0
        self.problem: str | None = None
        """Why there are no snapshots; None while there are."""

    @property
    def bytes(self) -> int:
        """Bytes of memory that this rank's snapshots take on its node."""
        return sum(slot.bytes for slot in self._slots)

    @property
    def every_steps(self) -> int:
        """Steps between snapshots."""
        if self._fixed_interval is not None:
            return self._fixed_interval
        if not self._cost_s or not self._step_s:
            return 1
        return max(math.ceil(self._cost_s / (COST * self._step_s)), 1)

    def cost(self) -> tuple[int, float] | None:
        """Number of steps between two snapshots and the share of the time that they take; None before the first ones have settled."""
        if self._taken < SETTLED or not self._step_s:
            return None
        return self.every_steps, self._cost_s / (self.every_steps * self._step_s)

    def is_due(self, step_s: float) -> bool:
        """Whether a snapshot is to be taken after a step that took `step_s`; called at each."""
        self._step_s = 0.9 * self._step_s + 0.1 * step_s if self._step_s else step_s
        if self._steps_since is not None:
            self._steps_since += 1
        return self.problem is None and (self._steps_since is None or self._steps_since >= self.every_steps)

    def begin(
        self,
        step: int,
        held: RankState,
        copies: Mapping[str, Tensor],
        rows: Sequence[StepRow],
        send: Send | None = None,
    ) -> None:
        """Begin to copy; `wait()` comes before the tensors change.

        Args:
            step: number of steps that are in the state.
            held: the state; the same object as before for as long as its tensors are the same.
            copies: copies of the tensors that change before the next `wait()`, by name.
            rows: rows of the ledger that may not have reached storage.
            send: called in the thread with the snapshot's meta and bytes, which it copies before it returns.
        """
        self.wait()
        began = time.perf_counter()
        self._steps_since = 0
        if held is not self._held and not self._lay_out(held):
            return
        slot, self._next = self._slots[self._next], 1 - self._next
        sources = list({**self._sources, **copies}.values())
        self._taking = self._thread.submit(slot.write, sources, _ready(sources), encoded(self._fixed_meta, step, rows))
        if send:
            self._thread.submit(slot.give, send)
        self._held_up_s += time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the snapshot under way is whole."""
        if self._taking:
            taking, self._taking = self._taking, None
            began = time.perf_counter()
            try:
                cost_s = taking.result()
            except OSError as error:
                self.problem = str(error)
                return
            cost_s += self._held_up_s + time.perf_counter() - began
            self._held_up_s = 0.0
            self._taken += 1
            self._cost_s = 0.7 * self._cost_s + 0.3 * cost_s if self._cost_s else cost_s

    def delete(self) -> None:
        """Free the memory: the run is over."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Leave the snapshots for a later group."""
        self.wait()
        self._thread.shutdown()
        self._slots = []

    def _lay_out(self, held: RankState) -> bool:
        """Make room for other tensors than before; False where there is none."""
        arrangement = Arrangement(held.pieces)
        self._held = held
        self._sources = {name: piece.tensor for name, piece in held.pieces.items()}
        self._fixed_meta = fixed_meta(self._plan_digest, self._attempt, arrangement, held)
        if self._slots and arrangement.places == self._places:
            return (
                True  # other tensors and values in the same room, as with an optimizer that counts steps in its groups
            )
        self._places, self._slots = arrangement.places, []
        try:
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_private(self._folder):
                self.problem = f"{self._folder.parent} can be written to by others: remove it"
                return False
            _delete_old(self._folder.parent)
            room = os.statvfs(MEMORY)
            own = sum(file.stat().st_size for file in self._own.glob("*/data"))
            free = min(room.f_bavail * room.f_frsize, available_memory()) + own
            if 2 * arrangement.bytes > FREE_SHARE * free:
                two, half = f"two copies of {arrangement.bytes / 2**20:.0f} MiB", f"half of the {free / 2**20:.0f} MiB"
                self.problem = f"{two} are more than {half} that {MEMORY} has free"
                return False
            newest = max(find_snapshots(self._own, self._plan_digest), key=lambda each: each.age, default=None)
            self._next = int(newest is not None and newest.data == self._own / "a" / "data")
            self._slots = [_Slot(self._own / name, arrangement) for name in ("a", "b")]
        except OSError as error:
            self.problem = str(error)
            return False
        return True


class _Slot:
    """One of the two places in memory for a snapshot."""

    def __init__(self, folder: Path, arrangement: Arrangement):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._meta: bytes | None = None
        self.bytes = arrangement.bytes
        size = max(arrangement.bytes, 1)
        descriptor = os.open(folder / "data", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size != size:  # of another model
                (folder / "meta.json").unlink(missing_ok=True)
                os.ftruncate(descriptor, 0)
                # Pages that are not there when they are written end the process; here they end the snapshots.
                os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._views = arrangement.views(self._map)

    def write(self, sources: Sequence[Tensor], ready: torch.cuda.Event | None, meta: bytes) -> float:
        """Copy the tensors. Returns the seconds of processor time that this took, which the training may have missed."""
        self._meta = None
        began = time.thread_time()
        (self._folder / "meta.json").unlink(missing_ok=True)
        if ready:  # in a stream of its own, so that the next step's kernels do not wait for the copies
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                torch._foreach_copy_(self._views, list(sources))
        else:
            torch._foreach_copy_(self._views, list(sources))
        partial = self._folder / "meta.partial"
        partial.write_bytes(meta)
        partial.replace(self._folder / "meta.json")
        self._meta = meta
        return time.thread_time() - began

    def give(self, send: Send) -> None:
        """Send what was written."""
        if self._meta is not None and self.bytes:
            send(self._meta, memoryview(self._map))


def _ready(tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
    """An event after the GPU kernels that are under way, which may still write the tensors; None for tensors on the host."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _delete_old(folder: Path) -> None:
    """Free the memory of runs that were not resumed for KEPT_S."""
    for slot in folder.glob("*/*/*") if folder.name.startswith("undula-") else []:
        with suppress(OSError):  # its run may be removing it
            if time.time() - slot.stat().st_mtime > KEPT_S:
                shutil.rmtree(slot.parent.parent, ignore_errors=True)
