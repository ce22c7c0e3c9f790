"""Reader of the row groups of a shard, from a disk or with range requests from S3. It reads only the version in the manifest.

Every request to S3 is conditional on the ETag in the manifest, so that a changed object is refused and versions are never mixed. Ranges
with small gaps are joined, large ranges are split into parts that are fetched in parallel, and requests are retried when the store is busy
or the connection breaks.
"""

import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from undula.data.stored.cache import DiskCache
from undula.data.stored.manifest import Manifest
from undula.errors import ManifestError, StorageError
from undula.storage import ChangedError, MissingError, Object, Store, named_errors, temporary_problem

PART_BYTES = 16 * 2**20
"""Maximum size in bytes of one range request."""
HOLE_BYTES = 2**20
"""Maximum gap in bytes between two ranges that are fetched as one."""
PARALLEL_PARTS = 8
"""Number of range requests in flight per process."""
FOOTER_BYTES = 2**16
"""Number of bytes first fetched from the end of a shard; most footers are smaller."""
MAX_CHUNKS = 2**18
"""Maximum number of column chunks in the footers that a process keeps. Each chunk takes almost 1 KiB of memory."""
RETRY_FOR_S = 120.0
"""Time in seconds after which a failing range request is not retried again."""
TAIL_BYTES = 8
"""Size of the end of a Parquet file: the length of its footer, and a magic number."""
SIGNATURE_BYTES = 28
"""Size of the signature that follows the footer of a file with encrypted columns, if the footer itself is not encrypted."""
ENCRYPTED = (
    "{} is encrypted, and Undula has no keys for Parquet files; write its rows to another folder without encryption"
)
"""Message about an encrypted file."""

_HUGE_PAGE = 2 * 2**20


@dataclass(frozen=True)
class Shard:
    """One file of a data set in one version."""

    store: Store
    """Folder of the data set."""
    name: str
    bytes: int
    version: str
    """Version of the file in the manifest: the ETag on S3, the size and modification time on a disk."""
    cache: DiskCache | None = None
    """Cache of data from S3."""

    @classmethod
    def of(cls, manifest: Manifest, number: int, cache: DiskCache | None = None) -> "Shard":
        """Return a file of a data set by its place in the manifest."""
        file = manifest.files[number]
        return cls(manifest.store, file.name, file.bytes, file.version, cache)

    def row_group(self, number: int, columns: Sequence[str]) -> pa.Table:
        """Read the rows of a row group.

        Raises:
            ManifestError: The file does not exist, has changed or is damaged.
            StorageError: The file cannot be read for another reason.
        """
        try:
            if (
                self.store.is_s3 and self.bytes <= FOOTER_BYTES
            ):  # one request instead of one for the footer and one for the rows
                file = pq.ParquetFile(pa.BufferReader(_read(self, 0, self.bytes)))
                return file.read_row_group(number, columns=list(columns), use_threads=False)
            metadata = _footers.of(self)
            source = self._source(_ranges(metadata, number, columns))
            file = pq.ParquetFile(source, metadata=metadata)
            return file.read_row_group(number, columns=list(columns), use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise ManifestError(
                f"{self} does not match its manifest: {error}; restore it or run `undula data index {self.store.url}`"
            ) from error

    def footer(self) -> pq.FileMetaData:
        """Read the footer of the file.

        Raises:
            ManifestError: The file does not exist, has changed, is damaged or is encrypted.
            StorageError: The file cannot be read for another reason.
        """
        return parse_footer(read_footer(self), str(self), f"; restore it or run `undula data index {self.store.url}`")

    def _source(self, ranges: Sequence[tuple[int, int]]) -> pa.NativeFile:
        """Open the file such that at least the given ranges can be read."""
        if self.store.is_s3:
            return pa.BufferReader(pa.py_buffer(self._fetched(ranges)))
        try:
            stat = Path(self.store.path(self.name)).stat()
        except FileNotFoundError:
            raise _missing(self) from None
        if f"size {stat.st_size}, mtime {stat.st_mtime_ns}" != self.version:
            raise _changed(self)
        return self.store.open(
            self.name
        )  # a memory map would kill the process if the file were truncated during a read

    def _fetched(self, ranges: Sequence[tuple[int, int]]) -> mmap.mmap:
        """Return an image of the object in which the given ranges are filled. The rest takes no memory."""
        # Without MAP_NORESERVE, the kernel may refuse an image of a large object, although most of its pages stay unused.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        image = mmap.mmap(-1, self.bytes, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE") and sum(stop - begin for begin, stop in ranges) > _HUGE_PAGE:
            image.madvise(mmap.MADV_HUGEPAGE)  # page faults of 4 KiB pages would take longer than filling them
        view = memoryview(image)
        parts = [
            (start, min(start + PART_BYTES, stop)) for begin, stop in ranges for start in range(begin, stop, PART_BYTES)
        ]
        list(_threads().map(lambda part: _fetch(self, part[0], view[part[0] : part[1]]), parts))
        return image

    def __str__(self) -> str:
        return f"{self.store.url}/{self.name}"


def read_footer(shard: Shard) -> bytes:
    """Read the footer of a shard, with the eight bytes that follow it: its length and a magic number.

    The result is shorter if the file is not an intact Parquet file.

    Raises:
        ManifestError: The file does not exist or has changed.
        StorageError: The file cannot be read for another reason.
    """
    tail = _read(shard, max(shard.bytes - FOOTER_BYTES, 0), shard.bytes)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if len(tail) < length <= shard.bytes:
        tail = _read(shard, shard.bytes - length, shard.bytes - len(tail)) + tail
    return tail[-length:]


def parse_footer(data: bytes, where: str, fix: str = "") -> pq.FileMetaData:
    """Return what `read_footer` has read.

    Args:
        data: Footer, with the eight bytes that follow it.
        where: URL of the file, for messages.
        fix: End of the message about a damaged file.

    Raises:
        ManifestError: The file is damaged or encrypted.
    """
    metadata = None
    if not data.endswith(b"PARE"):
        with intact(where, fix):
            metadata = pq.read_metadata(pa.BufferReader(data))
    # To ask Arrow for an encrypted column would end the process.
    if metadata is None or len(data) - TAIL_BYTES - metadata.serialized_size == SIGNATURE_BYTES:
        raise ManifestError(ENCRYPTED.format(where))
    return metadata


@contextmanager
def intact(where: str, fix: str = "") -> Iterator[None]:
    """Raise errors of Arrow about a Parquet file as ManifestErrors. The arguments are those of `parse_footer`."""
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        detail = " ".join(str(error).split()).rstrip(".")
        raise ManifestError(f"{where} is not an intact Parquet file: {detail}{fix}") from error


def _read(shard: Shard, start: int, stop: int) -> bytes:
    if not shard.store.is_s3:
        with shard._source(()) as file:
            file.seek(start)
            return bytes(file.read(stop - start))
    data = bytearray(stop - start)
    if data:  # no range describes the bytes of an empty object
        _fetch(shard, start, memoryview(data))
    return bytes(data)


class Footers:
    """Footers of the shards that this process has read last.

    They are limited by their size and not by their number, because those of a large data set would take gigabytes.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Shard, pq.FileMetaData] = OrderedDict()
        self._chunks = 0
        self._lock = threading.Lock()

    def of(self, shard: Shard) -> pq.FileMetaData:
        """Return the footer of a shard, which is read if it is not kept."""
        with self._lock:
            if shard in self._kept:
                self._kept.move_to_end(shard)
                return self._kept[shard]
        footer = shard.footer()
        with self._lock:
            if shard not in self._kept:
                self._kept[shard] = footer
                self._chunks += _chunks_of(footer)
            while self._chunks > MAX_CHUNKS and len(self._kept) > 1:
                self._chunks -= _chunks_of(self._kept.popitem(last=False)[1])
        return footer

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._chunks = 0


_footers = Footers()


def _chunks_of(footer: pq.FileMetaData) -> int:
    return int(footer.num_row_groups * footer.num_columns)


def _ranges(metadata: pq.FileMetaData, number: int, columns: Sequence[str]) -> list[tuple[int, int]]:
    """Return the byte ranges of a row group's column chunks; ranges with small gaps are joined."""
    group, wanted = metadata.row_group(number), set(columns)
    joined: list[tuple[int, int]] = []
    chunks = [group.column(place) for place in range(group.num_columns)]
    starts = [
        (min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))), chunk.total_compressed_size)
        for chunk in chunks
        if _is_below(chunk.path_in_schema, wanted)
    ]
    for start, size in sorted(starts):
        if joined and start - joined[-1][1] <= HOLE_BYTES:
            joined[-1] = (joined[-1][0], max(joined[-1][1], start + size))
        else:
            joined.append((start, start + size))
    return joined


def _is_below(path: str, columns: Set[str]) -> bool:
    """Return whether a path in a schema is a column or lies in it. Names of columns may have dots themselves."""
    ends = [*(place for place, sign in enumerate(path) if sign == "."), len(path)]
    return any(path[:end] in columns for end in ends)


def _fetch(shard: Shard, start: int, into: memoryview) -> None:
    """Fill `into` with the bytes of the object from `start` on. The key of the cache contains the version, so a hit needs no request."""
    key = f"{shard} {shard.version} {start} {len(into)}"
    if shard.cache and shard.cache.read_into(key, into):
        return
    _fetch_from_s3(shard, start, into)
    if shard.cache:
        shard.cache.write(key, into)


def _fetch_from_s3(shard: Shard, start: int, into: memoryview) -> None:
    bucket, key = shard.store.on_s3(shard.name)
    try:
        item = Object(key, shard.bytes, shard.version.removeprefix("etag "))
        bucket.read_into(item, start, into, RETRY_FOR_S)
    except MissingError as error:
        raise _missing(shard) from error
    except ChangedError as error:
        raise _changed(shard) from error
    except StorageError:
        raise
    except Exception as error:
        if problem := temporary_problem(error):
            raise StorageError(
                f"{shard} could not be read for {RETRY_FOR_S:.0f} s: {problem}; check the store and submit the job again"
            ) from error
        with named_errors("read", str(shard)):
            raise


def _changed(shard: Shard) -> ManifestError:
    return ManifestError(
        f"{shard} has changed since it was indexed; restore it or run `undula data index {shard.store.url}`"
    )


def _missing(shard: Shard) -> ManifestError:
    return ManifestError(
        f"{shard} is in the manifest but does not exist; restore it or run `undula data index {shard.store.url}`"
    )


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(PARALLEL_PARTS, thread_name_prefix="undula-fetch")
