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
COUNTED_FOLDERS = 2
"""Number of folders of unknown size that one write lists, if the cache has no file of sizes yet."""
LOCK_WITHIN_S = 1.0
"""Maximum time in seconds to wait for another process that evicts entries or was stopped."""

_BYTES = 8 * (FOLDERS + 1)
_UNKNOWN = -1
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
            sizes = _read(file)
            if sizes.min() > _UNKNOWN and _total(sizes) + num_bytes <= self.max_bytes:
                os.pwrite(file, (sizes[number] + num_bytes).tobytes(), 8 * number)
                return True
            try:
                self._count(sizes, number)
                if _total(sizes) + num_bytes > self.max_bytes:
                    self._evict(sizes, num_bytes)
                has_room = _total(sizes) + num_bytes <= self.max_bytes
                sizes[number] += num_bytes if has_room else 0
                return has_room
            finally:
                os.pwrite(file, sizes.tobytes(), 0)

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

    def _count(self, sizes: Sizes, number: int) -> None:
        """Count the entries of some folders of unknown size, and of folder `number` if its size is unknown."""
        unknown = [int(folder) for folder in np.flatnonzero(sizes[:FOLDERS] == _UNKNOWN)]
        for folder in sorted(unknown, key=lambda folder: folder != number)[:COUNTED_FOLDERS]:
            sizes[folder] = sum(size for _, size, _ in self._entries(folder))

    def _evict(self, sizes: Sizes, num_bytes: int) -> None:
        """Evict the least recently used entries of samples until `num_bytes` more fit, or MOST_ROUNDS have passed."""
        goal = self.max_bytes * FILL_AFTER_EVICTION
        for _ in range(MOST_ROUNDS):
            entries, is_all = self._sample(sizes)
            total = _total(sizes) + num_bytes
            if total <= self.max_bytes:
                return  # the sizes were too large
            for _, size, path, number in sorted(entries)[: None if is_all else int(len(entries) * EVICTED_SHARE) + 1]:
                if total <= goal:
                    return
                with suppress(FileNotFoundError):
                    Path(path).unlink()
                sizes[number] -= size
                total -= size
            if total <= self.max_bytes:
                return

    def _sample(self, sizes: Sizes) -> tuple[list[tuple[int, int, str, int]], bool]:
        """List folders until they have SAMPLE_ENTRIES, and correct their sizes.

        Returns:
            The entries (time of the last use, size, path, folder) and whether they are all of the cache.
        """
        entries: list[tuple[int, int, str, int]] = []
        for _ in range(FOLDERS):
            number = int(sizes[_NEXT]) % FOLDERS
            own = list(self._entries(number))
            sizes[number] = sum(size for _, size, _ in own)
            sizes[_NEXT] = number + 1
            entries += [(*entry, number) for entry in own]
            if len(entries) >= SAMPLE_ENTRIES:
                return entries, False
        return entries, True

    def _entries(self, number: int) -> Iterator[tuple[int, int, str]]:
        """Yield the entries of a folder as (time of the last use in ns, size in bytes, path)."""
        with suppress(FileNotFoundError), os.scandir(self.folder / f"{number:02x}") as files:
            for file in files:
                with suppress(FileNotFoundError):  # a damaged entry that another process has just deleted
                    stat = file.stat()
                    yield stat.st_mtime_ns, stat.st_size, file.path


def _read(file: int) -> Sizes:
    data = os.pread(file, _BYTES, 0)
    if len(data) == _BYTES:
        return np.frombuffer(data, np.int64).copy()
    sizes = np.full(FOLDERS + 1, _UNKNOWN, np.int64)  # an older version may have filled the cache
    sizes[_NEXT] = 0
    return sizes


def _total(sizes: Sizes) -> int:
    return int(np.maximum(sizes[:FOLDERS], 0).sum())


def _has_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
