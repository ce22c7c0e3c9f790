"""Disk cache of data fetched from S3. All processes of a node share it, so that later epochs and resumes read from the disk."""

import os
import secrets
import socket
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from undula.data.stored.cache_sizes import CacheSizes
from undula.storage import LostCache, report_lost_cache

_CRC_BYTES = 4
_losing = threading.Lock()
_problems: dict[str, str] = {}
"""Reason for which this process writes no more entries, by folder of the cache."""


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
        except OSError:
            return False
        with suppress(OSError):  # a read-only cache keeps its entries
            os.utime(path)  # marks the entry as used now
        return True

    def write(self, key: str, data: memoryview) -> None:
        """Store an entry, unless it is larger than the cache or an earlier one could not be written."""
        num_bytes = len(data) + _CRC_BYTES
        if num_bytes > self.max_bytes or self.problem:
            return
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        try:
            if not CacheSizes(path.parent.parent, self.max_bytes).reserve(int(path.parent.name, 16), num_bytes):
                return
            path.parent.mkdir(exist_ok=True)
            with partial.open("xb") as file:
                file.write(zlib.crc32(data).to_bytes(_CRC_BYTES, "little"))
                file.write(data)
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            if not isinstance(error, FileNotFoundError):  # which means that someone deletes the folder at this moment
                self._lose(error.strerror or str(error))

    def _lose(self, problem: str) -> None:
        with _losing:  # several threads can fail at the same time
            is_first = self.folder not in _problems
            _problems.setdefault(self.folder, problem)
        if is_first:
            report_lost_cache(LostCache(self.folder, socket.gethostname(), problem))

    @property
    def problem(self) -> str | None:
        """Reason for which this process writes no more entries, such as a full disk; None if it writes them."""
        return _problems.get(self.folder)

    def _path(self, key: str) -> Path:
        name = sha256(key.encode()).hexdigest()
        return Path(self.folder).expanduser() / name[:2] / name
