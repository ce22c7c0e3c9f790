"""What a run has printed, kept in its directory: the cluster that has printed it may end with the run."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from undula.errors import StorageError
from undula.masking.values import mask
from undula.state.directory import OUTPUT
from undula.storage import Store
from undula.telemetry.live import STATUS_PREFIX

PART_BYTES = 2**20
"""Size in bytes from which on a file is complete. Until then, it is written anew with each change."""
MOST_PARTS = 100
"""Maximum number of files of an attempt; older ones are deleted."""
INTERVAL_S = 5.0
"""Minimum seconds between two writes of a file."""


class KeptOutput:
    """Keeps the lines of an attempt, without secrets and status lines. A failure of the storage loses lines, and nothing else.

    Args:
        store: Run directory.
    """

    def __init__(self, store: Store):
        self._store, self._began = store, f"{time.time_ns() // 10**6:013}"
        self._part, self._text, self._is_written, self._written_at = 0, "", True, 0.0
        self._lock = threading.Lock()  # lines and the result come from different threads
        self._thread = ThreadPoolExecutor(1, "undula-output")
        self._writing: Future[None] | None = None

    def add(self, lines: Sequence[str]) -> None:
        """Add lines. They are written in the background, unless those before them still are; then a later call writes them."""
        added = "".join(f"{line}\n" for line in lines if not line.startswith(STATUS_PREFIX))
        with self._lock:
            self._text, self._is_written = self._text + mask(added), self._is_written and not added
            is_idle = self._writing is None or self._writing.done()
            if is_idle and time.monotonic() - self._written_at >= INTERVAL_S:
                self._write()

    def finish(self, text: str = "") -> None:
        """Add a text, and wait until everything is written. Further texts may follow."""
        self.add(text.splitlines())
        with self._lock:
            self._write()
        if self._writing:
            self._writing.result()

    def _write(self) -> None:
        if self._is_written:
            return
        self._writing = self._thread.submit(self._write_part, self._part, self._text.encode(errors="backslashreplace"))
        self._is_written, self._written_at = True, time.monotonic()
        if len(self._text) >= PART_BYTES:
            self._part, self._text = self._part + 1, ""

    def _write_part(self, part: int, content: bytes) -> None:
        with suppress(StorageError):
            self._store.write(self._name(part), content)
            if part >= MOST_PARTS:
                self._store.delete(self._name(part - MOST_PARTS))

    def _name(self, part: int) -> str:
        return f"{OUTPUT}/{self._began}-{part:06}.txt"


def kept_output(store: Store) -> str:
    """Return what the newest attempt of a run has printed; an empty text if the run has kept nothing."""
    names = sorted(store.names(OUTPUT))
    newest = [name for name in names if name.partition("-")[0] == names[-1].partition("-")[0]]
    return "".join(store.read(f"{OUTPUT}/{name}").decode() for name in newest)
