"""Sizes of the folders of a disk cache, in one file that all processes of a node share, so that no write has to look at all entries."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FOLDERS = 256
"""Number of folders below that of the cache. Their names are hexadecimal numbers, and entries are spread over them by hash."""
FILE_NAME = "sizes"
SAMPLE_ENTRIES = 1000
"""Number of entries among which an eviction finds the least recently used ones, from as many folders as have them."""
EVICTED_SHARE = 1 / 4
"""Largest share of these entries that is evicted at once, unless they are all entries of the cache."""
FILL_AFTER_EVICTION = 0.9
"""Fraction of the limit that is filled after an eviction. It is below 1, so that not every write has to evict entries."""
MOST_ROUNDS = 8
"""Number of samples from which one write evicts. A cache that is far too large, because its limit was lowered, shrinks over many writes."""
LOCK_WITHIN_S = 1.0
"""Maximum time in seconds to wait for another process that evicts entries or was stopped."""

_BYTES = 8 * (FOLDERS + 1)
_NEXT = FOLDERS  # place of the number of the folder that the next eviction lists first
Sizes = NDArray[np.int64]


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of the folders of a cache, in bytes.

    An entry is counted before it is written, and each eviction corrects the sizes of the folders that it lists. So the sum is right up to
    entries that were lost with a process, deleted by hand, or written twice.
    """

    folder: Path
    max_bytes: int
    """Size limit of the cache in bytes."""

    def reserve(self, number: int, num_bytes: int) -> bool:
        """Count an entry that is about to be written to a folder, and evict entries that were not used for long if it may not fit.

        Args:
            number: Number of the folder.
            num_bytes: Size of the entry in bytes.

        Returns:
            Whether there is room for the entry.
        """
        with self._locked() as file:
            if file is None:
                return False
            sizes = self._read(file)
            if sizes[:FOLDERS].sum() + num_bytes > self.max_bytes:
                try:
                    self._evict(sizes, num_bytes)
                finally:
                    os.pwrite(file, sizes.tobytes(), 0)
            if sizes[:FOLDERS].sum() + num_bytes > self.max_bytes:
                return False
            os.pwrite(file, (sizes[number] + num_bytes).tobytes(), 8 * number)
        return True

    @contextmanager
    def _locked(self) -> Iterator[int | None]:
        """Open and lock the file; yield None if another thread or process keeps it locked."""
        file = self._open()
        try:
            deadline = time.monotonic() + LOCK_WITHIN_S
            while not _has_locked(file) and time.monotonic() < deadline:
                time.sleep(0.002)
            yield file if _has_locked(file) else None
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing it would not be enough if this process was forked in between
            os.close(file)

    def _open(self) -> int:
        path, flags = self.folder / FILE_NAME, os.O_RDWR | os.O_CREAT
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            self.folder.mkdir(parents=True, exist_ok=True)
            return os.open(path, flags, 0o666)

    def _read(self, file: int) -> Sizes:
        data = os.pread(file, _BYTES, 0)
        if len(data) == _BYTES:
            return np.frombuffer(data, np.int64).copy()
        # The cache is new, or an older version without this file has filled it.
        sizes = np.zeros(FOLDERS + 1, np.int64)
        for number in range(FOLDERS):
            sizes[number] = sum(size for _, size, _ in self._entries(number))
        os.pwrite(file, sizes.tobytes(), 0)
        return sizes

    def _evict(self, sizes: Sizes, num_bytes: int) -> None:
        """Evict the least recently used entries of samples until `num_bytes` more fit, or MOST_ROUNDS have passed."""
        goal = self.max_bytes * FILL_AFTER_EVICTION
        for _ in range(MOST_ROUNDS):
            entries, is_all = self._sample(sizes)
            total = int(sizes[:FOLDERS].sum()) + num_bytes
            if total <= self.max_bytes:
                return  # the sizes were too large
            for _, size, file, number in sorted(entries)[: None if is_all else int(len(entries) * EVICTED_SHARE) + 1]:
                if total <= goal:
                    return
                with suppress(FileNotFoundError):
                    file.unlink()
                sizes[number] -= size
                total -= size
            if total <= self.max_bytes:
                return

    def _sample(self, sizes: Sizes) -> tuple[list[tuple[int, int, Path, int]], bool]:
        """List folders until they have SAMPLE_ENTRIES, and correct their sizes.

        Returns:
            The entries (time of the last use, size, file, folder) and whether they are all of the cache.
        """
        entries: list[tuple[int, int, Path, int]] = []
        for _ in range(FOLDERS):
            number = int(sizes[_NEXT]) % FOLDERS
            found = list(self._entries(number))
            sizes[number] = sum(size for _, size, _ in found)
            sizes[_NEXT] = number + 1
            entries += [(*entry, number) for entry in found]
            if len(entries) >= SAMPLE_ENTRIES:
                return entries, False
        return entries, True

    def _entries(self, number: int) -> Iterator[tuple[int, int, Path]]:
        """Yield the entries of a folder as (time of the last use in ns, size in bytes, file)."""
        with suppress(FileNotFoundError), os.scandir(self.folder / f"{number:02x}") as files:
            for file in files:
                with suppress(FileNotFoundError):  # a damaged entry that another process has just deleted
                    stat = file.stat()
                    yield stat.st_mtime_ns, stat.st_size, Path(file.path)


def _has_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
