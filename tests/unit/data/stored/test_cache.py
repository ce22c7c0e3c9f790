"""Tests of the disk cache: a read returns the written bytes or nothing, and the size limit holds."""

import errno
import fcntl
import multiprocessing
import os
import random
import shutil
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from undula.data.stored import cache_sizes
from undula.data.stored.cache import DiskCache
from undula.data.stored.cache_sizes import CacheSizes


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in entries(folder))


def entries(folder: Path) -> list[Path]:
    return [file for file in folder.glob("??/*") if file.is_file()]


def read(cache: DiskCache, key: str, length: int) -> bytes | None:
    into = bytearray(length)
    return bytes(into) if cache.read_into(key, memoryview(into)) else None


def fill(cache: DiskCache, numbers: range) -> None:
    """Write entries of 100 bytes."""
    for number in numbers:
        cache.write(f"{number}", memoryview(bytes(96)))


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
    (file,) = entries(tmp_path)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes({"flip": bytes(data), "cut": bytes(data[:-1]), "empty": b""}[harm])
    assert read(cache, "a", 5) is None
    assert not file.exists()


def test_the_least_recently_used_entries_are_evicted_first(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 1000)
    for number in range(9):
        cache.write(f"{number}", memoryview(bytes(100)))
        for file in entries(tmp_path):  # as if a second had passed since the write
            os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns - 10**9))
    assert read(cache, "0", 100) is not None  # used again, so entry 1 is now the least recently used
    cache.write("new", memoryview(bytes(100)))
    assert size_of(tmp_path) <= 1000
    assert read(cache, "0", 100) is not None
    assert read(cache, "new", 100) is not None
    assert read(cache, "1", 100) is None


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the folders that the cache lists, in order."""
    names: list[str] = []
    scandir = os.scandir

    def recorded(path: Path) -> Any:
        names.append(path.name)
        return scandir(path)

    monkeypatch.setattr(cache_sizes.os, "scandir", recorded)
    return names


def test_writes_look_at_few_entries(tmp_path: Path, listed: list[str]) -> None:
    cache = DiskCache(str(tmp_path), 100_000)
    for _ in range(128):
        cache.write("first", memoryview(bytes(96)))
    listed.clear()  # a new cache is counted, in parts
    fill(cache, range(400))
    assert not listed
    assert size_of(tmp_path) == 40_100


def test_an_eviction_lists_a_few_folders_and_evicts_what_was_not_used(
    tmp_path: Path, listed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_sizes, "SAMPLE_ENTRIES", 50)
    cache = DiskCache(str(tmp_path), 60_000)
    fill(cache, range(600))
    for number in range(300):  # which were not used since long ago
        os.utime(cache._path(f"{number}"), (0, 0))
    listed.clear()
    fill(cache, range(600, 750))
    assert 54_000 <= size_of(tmp_path) <= 60_000
    assert len(listed) < 500
    assert all(read(cache, f"{number}", 96) is not None for number in range(300, 750))


def test_a_cache_without_sizes_is_counted_in_parts(tmp_path: Path, listed: list[str]) -> None:
    """Such a cache was filled by an older version, or someone has deleted the file."""
    cache = DiskCache(str(tmp_path), 1000)
    fill(cache, range(9))
    (tmp_path / "sizes").unlink()
    listed.clear()
    cache.write("9", memoryview(bytes(96)))
    assert len(listed) == 2
    for _ in range(127):
        cache.write("9", memoryview(bytes(96)))
    assert len(set(listed)) == 256
    assert size_of(tmp_path) <= 1000


def test_entries_that_someone_deletes_make_room(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 1000)
    fill(cache, range(10))
    for file in entries(tmp_path)[1:]:
        file.unlink()
    kept = entries(tmp_path)
    fill(cache, range(10, 19))
    assert len(entries(tmp_path)) == 10
    assert set(kept) <= set(entries(tmp_path))


def test_a_cache_that_is_far_too_large_shrinks_over_several_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_sizes, "SAMPLE_ENTRIES", 4)
    large, small = DiskCache(str(tmp_path), 30_000), DiskCache(str(tmp_path), 10_000)
    fill(large, range(300))
    sizes = []
    for number in range(300, 340):
        small.write(f"{number}", memoryview(bytes(96)))
        sizes.append(size_of(tmp_path))
    assert sizes[0] > 25_000
    assert sizes[-1] <= 10_000


def write_many(folder: str, seed: int, is_ready: Any) -> None:
    is_ready.wait()
    cache = DiskCache(folder, 100_000)
    for number in range(150):
        cache.write(f"{seed} {number}", memoryview(bytes(996)))


def test_processes_keep_the_limit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    is_ready = context.Barrier(3)
    processes = [context.Process(target=write_many, args=(str(tmp_path), seed, is_ready)) for seed in range(2)]
    for process in processes:
        process.start()
    is_ready.wait()
    largest = 0
    while any(process.is_alive() for process in processes):
        with suppress(FileNotFoundError):
            largest = max(largest, size_of(tmp_path))
    assert [process.exitcode for process in processes] == [0, 0]
    assert 90_000 <= size_of(tmp_path) <= 100_000
    assert largest <= 102_000  # files that are being written, and listings that overlap evictions


def test_a_process_that_keeps_the_lock_delays_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_sizes, "LOCK_WITHIN_S", 0.01)
    cache = DiskCache(str(tmp_path), 1000)
    cache.write("a", memoryview(b"1"))
    with (tmp_path / "sizes").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache.write("b", memoryview(b"2"))
    cache.write("c", memoryview(b"3"))
    assert [read(cache, key, 1) for key in "abc"] == [b"1", None, b"3"]
    assert cache.problem is None


def test_a_lock_does_not_outlive_a_write_in_a_forked_process(tmp_path: Path) -> None:
    sizes = CacheSizes(tmp_path, 1000)
    with sizes._locked():
        child = multiprocessing.get_context("fork").Process(target=signal.pause)
        child.start()
    try:
        assert sizes.reserve(0, 10)
    finally:
        child.kill()
        child.join()


def test_an_entry_that_is_larger_than_the_cache_is_dropped(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 10)
    cache.write("a", memoryview(bytes(11)))
    assert size_of(tmp_path) == 0
    assert cache.problem is None


def test_a_folder_that_cannot_be_written_turns_the_cache_off(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    blocked = DiskCache(str(tmp_path / "file" / "below"), 1000)
    blocked.write("a", memoryview(b"1"))
    assert blocked.problem == "Not a directory"
    assert read(blocked, "a", 1) is None
    (tmp_path / "file").unlink()
    blocked.write("a", memoryview(b"1"))
    assert read(blocked, "a", 1) is None


@pytest.mark.parametrize("failing", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_turns_writes_off_and_keeps_the_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    cache = DiskCache(str(tmp_path), 1000)
    cache.write("a", memoryview(b"1"))
    tries = []

    def refuse(*arguments: Any, **options: Any) -> None:
        tries.append(arguments)
        raise OSError(failing, os.strerror(failing))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "replace", refuse)
        disk.setattr(os, "utime", refuse)
        cache.write("b", memoryview(b"2"))
        cache.write("c", memoryview(b"3"))
        assert len(tries) == 1
        assert read(cache, "a", 1) == b"1"
    assert cache.problem == os.strerror(failing)
    assert len(entries(tmp_path)) == 1


def test_a_cache_that_is_deleted_meanwhile_fills_again(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path / "cache"), 1000)
    cache.write("a", memoryview(b"1"))
    shutil.rmtree(tmp_path / "cache")
    cache.write("b", memoryview(b"2"))
    assert read(cache, "b", 1) == b"2"


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
