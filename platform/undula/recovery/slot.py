"""Places in the memory of a node to which a rank writes copies of tensors again and again."""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from undula.recovery.node_memory import RESERVED
from undula.recovery.snapshot import DATA, META, Arrangement

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
