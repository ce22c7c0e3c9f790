"""Tests of the disk cache: a read returns the written bytes or nothing, and the size limit holds."""

import os
import random
import threading
from pathlib import Path

import pytest

from undula.data.cache import DiskCache


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def read(cache: DiskCache, key: str, length: int) -> bytes | None:
    into = bytearray(length)
    return bytes(into) if cache.read_into(key, memoryview(into)) else None


def test_only_written_entries_are_found(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 10_000)
    assert read(cache, "a", 5) is None
    cache.write("a", memoryview(b"12345"))
    assert read(cache, "a", 5) == b"12345"
    assert read(cache, "b", 5) is None


@pytest.mark.parametrize("length", [4, 6])
def test_an_entry_of_another_length_counts_as_missing(tmp_path: Path, length: int) -> None:
    cache = DiskCache(str(tmp_path), 10_000)
    cache.write("a", memoryview(b"12345"))
    assert read(cache, "a", length) is None


@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_a_damaged_entry_counts_as_missing_and_is_deleted(tmp_path: Path, harm: str) -> None:
    cache = DiskCache(str(tmp_path), 10_000)
    cache.write("a", memoryview(b"12345"))
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes({"flip": bytes(data), "cut": bytes(data[:-1]), "empty": b""}[harm])
    assert read(cache, "a", 5) is None
    assert not file.exists()


def test_the_least_recently_used_entries_are_evicted_first(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 1000)
    for number in range(9):
        cache.write(f"{number}", memoryview(bytes(100)))
        for file in tmp_path.rglob("*"):  # as if a second had passed since the write
            if file.is_file():
                os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns - 10**9))
    assert read(cache, "0", 100) is not None  # used again, so entry 1 is now the least recently used
    cache.write("new", memoryview(bytes(100)))
    assert size_of(tmp_path) <= 1000
    assert read(cache, "0", 100) is not None
    assert read(cache, "new", 100) is not None
    assert read(cache, "1", 100) is None


def test_a_cache_of_many_entries_is_not_searched_at_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search takes half a second with 50,000 entries."""
    searches = []
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: searches.append(path) or glob(path, pattern))
    cache = DiskCache(str(tmp_path), 500_000)
    for number in range(4000):
        cache.write(f"{number}", memoryview(bytes(96)))
    assert len(searches) < 100
    assert size_of(tmp_path) == 400_000
    for number in range(4000, 5100):
        cache.write(f"{number}", memoryview(bytes(96)))
    assert 450_000 <= size_of(tmp_path) <= 500_000
    assert read(cache, "0", 96) is None
    assert read(cache, "5099", 96) is not None


def test_an_entry_that_is_too_large_or_cannot_be_written_is_dropped(tmp_path: Path) -> None:
    DiskCache(str(tmp_path), 10).write("a", memoryview(bytes(11)))
    assert size_of(tmp_path) == 0
    (tmp_path / "file").touch()
    blocked = DiskCache(str(tmp_path / "file" / "below"), 1000)
    blocked.write("a", memoryview(b"1"))
    assert read(blocked, "a", 1) is None


def test_concurrent_readers_never_see_partial_entries(tmp_path: Path) -> None:
    wrong = []

    def work(seed: int) -> None:
        cache, choose = DiskCache(str(tmp_path), 20_000), random.Random(seed)
        for _ in range(200):
            key = choose.randrange(20)
            content = bytes([key]) * 3000
            found = read(cache, str(key), 3000)
            if found is None:
                cache.write(str(key), memoryview(content))
            elif found != content:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
