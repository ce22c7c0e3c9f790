"""Memory of a node that the snapshots of its ranks share: who may take how much of it, and when it is freed.

The snapshots of a rank are in `USER/RUN/ATTEMPT/RANK/SLOT`, where USER is the folder of a user. A rank reserves memory by creating
its files with their final size but without contents, while it holds a lock on the user's folder. Such a file takes no memory, but other
ranks count its size. So all ranks and all runs of a node keep the limit together, although they fill their files in parallel.

Also here: places in the memory of a node to which a rank writes copies of tensors again and again.
"""

import fcntl
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from undula.recovery.snapshot import DATA, META, Arrangement, available_memory, is_private, slots_below
from undula.state.defaults import FREE_SHARE, MEMORY

RESERVED = "data.new"
"""File of a slot that has another size than its data, which it will replace."""
KEPT_S = 86_400.0
"""Seconds after the last snapshot of an unfinished run until the memory of its snapshots is freed."""
LOCK_S = 10.0
"""Maximum seconds to wait for other processes that reserve memory, which takes them milliseconds."""


@dataclass(frozen=True)
class _Use:
    """Memory that snapshots take, in bytes."""

    promised: int = 0
    """Size that the reserved files will have."""
    taken: int = 0

    def __add__(self, other: "_Use") -> "_Use":
        return _Use(self.promised + other.promised, self.taken + other.taken)


def reserve(own: Path, sizes: Mapping[str, int]) -> str | None:
    """Reserve memory for slots of a rank.

    All slots of the run's attempt on this node may take at most FREE_SHARE of the memory that would be free without them, and half of
    them at most FREE_SHARE of what is free while the slots of former attempts are still there.

    Args:
        own: Folder of the rank's slots.
        sizes: Size of each slot in bytes, by name.

    Returns:
        Reason why the rank cannot have the memory; None if it is reserved.

    Raises:
        OSError: The files cannot be made.
    """
    attempt, run, user = own.parents[:3]
    user.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(run):
        return f"other users can write to {user}; remove that folder"
    delete_old_runs(run)
    with _locked(user) as has_lock:
        if not has_lock:
            return f"another process has held the lock of {user} for more than {LOCK_S:.0f} s"
        free = free_memory()  # first, so that files that others fill at the same time do not seem to be missing memory
        slots = list(slots_below(user))
        everything = _total(slots)
        former = _total(slot for slot in slots if slot.parents[2] == run and slot.parents[1] != attempt)
        others = _total(slot for slot in slots if slot.parents[2] != run)
        replaced = {own / name for name in sizes}
        of_node = _total(slot for slot in slots if slot.parents[1] == attempt and slot not in replaced)
        need = of_node.promised + sum(sizes.values())
        free += everything.taken - others.promised
        room = min(free, 2 * (free - former.taken))
        if need > FREE_SHARE * room:
            return (
                f"the {need / 2**20:.0f} MiB that the workers of a node need would take more than half of the {room / 2**20:.0f} MiB that "
                f"are free in {MEMORY}"
            )
        for name, size in sizes.items():
            _reserve_file(own / name, max(size, 1))
    return None


def free_memory() -> int:
    """Return the bytes that files in the memory of this node can still take."""
    room = os.statvfs(MEMORY)
    return min(room.f_bavail * room.f_frsize, available_memory())


def delete_former_attempts(attempt: Path) -> None:
    """Delete the snapshots of a run's former attempts, given the folder of this attempt."""
    for folder in list(attempt.parent.iterdir()):
        if folder.name.isdecimal() and int(folder.name) < int(attempt.name):
            shutil.rmtree(folder, ignore_errors=True)


def delete_old_runs(run: Path) -> None:
    """Delete the snapshots of other runs that have taken none for KEPT_S seconds, given the folder of this run."""
    for other in list(run.parent.iterdir()) if run.parent.name.startswith("undula-") else []:
        with suppress(OSError):  # the other run may delete its folder at the same time
            newest = max((slot.stat().st_mtime for slot in other.glob("*/*/*")), default=other.stat().st_mtime)
            if other != run and time.time() - newest > KEPT_S:
                shutil.rmtree(other, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a lock that the other processes of this node respect, and yield whether it could be had. It ends with this process.

    A process that is suspended while it has the lock must not hold up the ranks of another run.
    """
    descriptor, until = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + LOCK_S
    try:
        while not (has_lock := _try_lock(descriptor)) and time.monotonic() < until:
            time.sleep(0.01)
        yield has_lock
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _reserve_file(slot: Path, size: int) -> None:
    slot.mkdir(parents=True, exist_ok=True, mode=0o700)
    data, reserved = slot / DATA, slot / RESERVED
    reserved.unlink(missing_ok=True)
    if not data.exists() or data.stat().st_size != size:
        reserved.touch(0o600)
        os.truncate(reserved, size)


def _total(slots: Iterable[Path]) -> _Use:
    return sum(map(_use_of, slots), _Use())


def _use_of(slot: Path) -> _Use:
    files: dict[int, os.stat_result] = {}
    for name in (RESERVED, DATA):  # in this order, because the owner may be renaming the first to the second
        with suppress(FileNotFoundError):
            file = (slot / name).stat()
            files[file.st_ino] = file
    # A reserved file will replace the data, so only its size counts.
    promised = next((file.st_size for file in files.values()), 0)
    return _Use(promised, sum(file.st_blocks * 512 for file in files.values()))


Send: TypeAlias = Callable[[bytes, memoryview], None]


class Slot:
    """One of the places that a rank writes in turn. Its memory must be reserved.

    A former snapshot stays valid until the first call of `write`.
    """

    def __init__(self, folder: Path, arrangement: Arrangement):
        self._folder = folder
        self._arrangement = arrangement
        self._map: mmap.mmap | None = None
        self._views: list[Tensor] = []
        self._meta: bytes | None = None
        self.bytes = arrangement.bytes

    @property
    def has_memory(self) -> bool:
        """Whether the slot has been written to."""
        return self._map is not None

    def write(self, sources: Sequence[Tensor], ready: torch.cuda.Event | None, meta: bytes) -> float:
        """Copy the tensors into the slot.

        Returns:
            Seconds of processor time that this took, which training may have lacked.
        """
        self._meta = None
        began = time.thread_time()
        if self._map is None:
            self._map = self._mapped_file()
            self._views = self._arrangement.views(self._map)
        (self._folder / META).unlink(missing_ok=True)
        if ready:  # a separate stream, so that the next step's kernels do not wait for the copies
            stream = torch.cuda.Stream(ready.device)  # type: ignore[no-untyped-call]
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                torch._foreach_copy_(self._views, list(sources))
        else:
            torch._foreach_copy_(self._views, list(sources))
        partial = self._folder / "meta.partial"
        partial.write_bytes(meta)
        partial.replace(self._folder / META)
        self._meta = meta
        return time.thread_time() - began

    def give(self, send: Send, meta: bytes, num_bytes: int) -> None:
        """Pass the first bytes of the snapshot in this slot to `send` with the meta that describes these, if there is a snapshot."""
        if self._meta is not None and self._map is not None:
            send(meta, memoryview(self._map)[:num_bytes])

    def _mapped_file(self) -> mmap.mmap:
        """Map the file of this slot. A file of another size is not changed but replaced, because other slots may have mapped it."""
        data, reserved = self._folder / DATA, self._folder / RESERVED
        is_new = reserved.exists()
        if is_new:  # free the memory of the former snapshot before taking more
            (self._folder / META).unlink(missing_ok=True)
            data.unlink(missing_ok=True)
        descriptor = os.open(reserved if is_new else data, os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            # Without this, writing to a page for which there is no memory would kill the process. Here it only disables snapshots.
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        if is_new:
            reserved.replace(data)
        return mapped


def ready_event(tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
    """Return an event that follows the GPU kernels in progress, which may still write the tensors; None if no tensor is on a GPU."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
