"""Disk cache of data fetched from S3. All processes of a node share it, so that later epochs and resumes read from the disk."""

import os
import secrets
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

_CRC_BYTES = 4
# Fraction of the limit that is filled after an eviction. It is below 1, so that not every write has to evict entries.
_FILL_AFTER_EVICTION = 0.9
# Fraction of the free room that a process fills before it counts the entries again, which takes half a second for 50,000 of them. Up to
# as many processes as this allows can write at once without exceeding the limit.
_FILL_BEFORE_COUNT = 1 / 16
_counting = threading.Lock()
_uncounted: dict[tuple[str, int], float] = {}
"""Bytes that this process may still write before it counts again, by folder and size limit."""


@dataclass(frozen=True)
class DiskCache:
    """Folder of byte strings by key that evicts the least recently used entries. Processes can share it safely.

    An entry is a file with a CRC-32 before its bytes. Entries appear atomically, and a damaged entry counts as missing.
    """

    folder: str
    max_bytes: int
    """Size limit of the cache in bytes."""

    def read_into(self, key: str, into: memoryview) -> bool:
        """Fill `into` with the bytes of an entry.

        Returns:
            Whether the cache has an intact entry of this length. If not, the content of `into` is undefined.
        """
        path = self._path(key)
        try:
            with path.open("rb") as file:
                crc = file.read(_CRC_BYTES)
                is_whole = file.readinto(into) == len(into) and not file.read(1)
            if not is_whole or zlib.crc32(into).to_bytes(_CRC_BYTES, "little") != crc:
                path.unlink(missing_ok=True)
                return False
            os.utime(path)  # marks the entry as used now
        except OSError:
            return False
        return True

    def write(self, key: str, data: memoryview) -> None:
        """Store an entry, unless it is larger than the cache or the disk is full or read-only."""
        if len(data) > self.max_bytes:
            return
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        try:
            self._make_room(len(data) + _CRC_BYTES)
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("xb") as file:
                file.write(zlib.crc32(data).to_bytes(_CRC_BYTES, "little"))
                file.write(data)
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        name = sha256(key.encode()).hexdigest()
        return Path(self.folder).expanduser() / name[:2] / name

    def _make_room(self, num_bytes: int) -> None:
        """Evict the least recently used entries if `num_bytes` more may not fit. Many writing processes can exceed the limit."""
        key = (self.folder, self.max_bytes)
        with _counting:
            left = _uncounted.get(key, 0.0) - num_bytes
            _uncounted[key] = left if left >= 0 else self._evict(num_bytes) * _FILL_BEFORE_COUNT

    def _evict(self, num_bytes: int) -> int:
        """Evict the least recently used entries until `num_bytes` more fit, and return the room that is left with them."""
        entries = []
        for file in Path(self.folder).expanduser().glob("??/*"):
            with suppress(FileNotFoundError):  # another process has evicted it
                stat = file.stat()
                entries.append((stat.st_mtime_ns, stat.st_size, file))
        total = sum(size for _, size, _ in entries) + num_bytes
        if total > self.max_bytes:
            for _, size, file in sorted(entries):
                file.unlink(missing_ok=True)
                total -= size
                if total <= self.max_bytes * _FILL_AFTER_EVICTION:
                    break
        return max(self.max_bytes - total, 0)
