"""A disk cache of what was fetched from S3, shared by the processes of a node, so that later epochs and resumes read from the disk."""

import os
import secrets
import zlib
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

_CRC_BYTES = 4
_ROOM = 0.9  # what is left of the limit after making room, so that not every write has to


@dataclass(frozen=True)
class DiskCache:
    """Byte strings by key in a folder, the least recently used leaving first. Safe for processes that share it.

    An entry is a file with a CRC-32 before its bytes; it appears whole, and one that is not what was written counts as missing.
    """

    folder: str
    max_bytes: int

    def read_into(self, key: str, into: memoryview) -> bool:
        """Fill `into` with an entry's bytes; False, with `into` in any state, where there is no such entry of this length."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                crc = file.read(_CRC_BYTES)
                is_whole = file.readinto(into) == len(into) and not file.read(1)
            if not is_whole or zlib.crc32(into).to_bytes(_CRC_BYTES, "little") != crc:
                path.unlink(missing_ok=True)
                return False
            os.utime(path)  # used now
        except OSError:
            return False
        return True

    def write(self, key: str, data: memoryview) -> None:
        """Keep an entry. A disk that is full or read-only only means that nothing is kept."""
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
        """Delete the least recently used entries where one more would not fit; what others write meanwhile may exceed the limit."""
        entries = []
        for file in Path(self.folder).expanduser().glob("??/*"):
            with suppress(FileNotFoundError):  # another process was faster
                stat = file.stat()
                entries.append((stat.st_mtime_ns, stat.st_size, file))
        total = sum(size for _, size, _ in entries)
        if total + num_bytes <= self.max_bytes:
            return
        for _, size, file in sorted(entries):
            file.unlink(missing_ok=True)
            total -= size
            if total + num_bytes <= self.max_bytes * _ROOM:
                return
