"""Writes to a disk cache that already has many entries: into a cache with room, and into a full one.

    python -m tests.baselines.bench_cache 40000 1000000

The entries are files without blocks on the disk, of 1000 bytes each. They are made in shared memory.
"""

import sys
import time
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from undula.data.stored.cache import DiskCache
from undula.data.stored.cache_sizes import FOLDERS

ENTRY_BYTES = 1004
"""Size in bytes of an entry of 1000 bytes, with its checksum."""
WRITES = 4000


def fill(folder: Path, count: int) -> None:
    for number in range(FOLDERS):
        (folder / f"{number:02x}").mkdir()
    for number in range(count):
        name = sha256(str(number).encode()).hexdigest()
        with (folder / name[:2] / name).open("xb") as file:
            file.truncate(ENTRY_BYTES)


def write(cache: DiskCache, first: int) -> str:
    seconds = []
    for number in range(first, first + WRITES):
        began = time.perf_counter()
        cache.write(f"new {number}", memoryview(bytes(ENTRY_BYTES - 4)))
        seconds.append(time.perf_counter() - began)
    mean, most = sum(seconds) / WRITES, max(seconds)
    return f"{mean * 1e3:.2f} ms on average, {seconds[0] * 1e3:.0f} ms for the first, {most * 1e3:.0f} ms at most"


def main() -> None:
    for count in map(int, sys.argv[1:]):
        with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            fill(Path(folder), count)
            print(f"{count} entries, room for more: {write(DiskCache(folder, 2**40), 0)}", flush=True)
            limit = (count + WRITES) * ENTRY_BYTES
            print(f"{count} entries, full: {write(DiskCache(folder, limit), WRITES)}", flush=True)


if __name__ == "__main__":
    main()
