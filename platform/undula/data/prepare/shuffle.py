"""Global shuffle of the rows of a source on disk, with bounded memory and a bounded number of open files."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from undula.data.prepare.sources import Source
from undula.errors import StorageError
from undula.plan.keys import key64, permuted

BUCKET_BYTES = 256 * 2**20
"""Approximate size in bytes of the rows that are permuted in memory at once."""
MOST_BUCKETS = 64
"""Maximum number of buckets, and so of open files, into which rows are dealt at once. A larger bucket is dealt again."""
DEAL_BYTES = 64 * 2**20
"""Approximate size in bytes of the rows that are dealt at once. The buckets get a part of them each, so small ones waste space."""


def shuffled(source: Source, seed: int) -> Source:
    """Return the source with all rows shuffled by the seed, where every order is equally likely.

    Each row is dealt to a random bucket on disk, and the rows of a bucket are permuted in memory. The files need about as much space in
    the folder for temporary files as the rows in memory.
    """

    def tables() -> Iterator[pa.Table]:
        with _temporary_folder() as folder:
            num_bytes = sum(table.nbytes for table in source.tables())
            buckets = _dealt(source.tables(), source.schema, num_bytes, _Place(folder, seed))
            for bucket in buckets:
                yield from _permuted(bucket, source.schema)

    return Source(source.num_rows, source.schema, tables)


@dataclass(frozen=True)
class _Place:
    """Place in the tree of buckets: the numbers of the bucket and of those that it was dealt from."""

    folder: Path
    seed: int
    path: tuple[int, ...] = ()

    @property
    def file(self) -> Path:
        return self.folder / f"{'-'.join(map(str, self.path))}.arrow"

    def key(self, purpose: str) -> int:
        return key64(purpose, self.seed, *self.path)

    def __truediv__(self, number: int) -> "_Place":
        return _Place(self.folder, self.seed, (*self.path, number))


@dataclass
class _Bucket:
    place: _Place
    num_rows: int = 0
    num_bytes: int = 0


def _permuted(bucket: _Bucket, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of a bucket in random order, and delete its file."""
    parts: list[_Bucket] = []
    with pa.memory_map(str(bucket.place.file)) as mapped:
        bucket.place.file.unlink()  # its space is free as soon as the map is closed
        reader = pa.ipc.open_file(mapped)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        if bucket.num_bytes > BUCKET_BYTES and bucket.num_rows > 1:
            tables = (pa.Table.from_batches([batch]) for batch in batches)
            parts = _dealt(tables, schema, bucket.num_bytes, bucket.place)
        elif bucket.num_rows:
            order = permuted(np.arange(bucket.num_rows), bucket.num_rows, bucket.place.key("bucket"))
            yield pa.Table.from_batches(batches, schema).take(pa.array(order))
    for part in parts:
        yield from _permuted(part, schema)


def _dealt(tables: Iterable[pa.Table], schema: pa.Schema, num_bytes: int, place: _Place) -> list[_Bucket]:
    """Deal rows into random buckets, each with a file."""
    count = min(max(-(-num_bytes // BUCKET_BYTES), 1), MOST_BUCKETS)
    buckets = [_Bucket(place / number) for number in range(count)]
    draws = np.random.Generator(np.random.Philox(key=place.key("deal")))
    with ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_file(str(bucket.place.file), schema)) for bucket in buckets]
        for table in _joined(tables):
            numbers = draws.integers(0, count, table.num_rows)
            sizes = np.bincount(numbers, minlength=count)
            by_bucket = table.take(pa.array(np.argsort(numbers, kind="stable"))).combine_chunks()
            for bucket, writer, start, size in zip(buckets, writers, np.cumsum(sizes) - sizes, sizes, strict=True):
                if size:
                    rows = by_bucket.slice(int(start), int(size))
                    writer.write_table(rows)
                    bucket.num_rows += rows.num_rows
                    bucket.num_bytes += rows.nbytes
    return buckets


def _joined(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join tables to some of at least DEAL_BYTES, except for the last one."""
    parts: list[pa.Table] = []
    num_bytes = 0
    for table in tables:
        parts.append(table)
        num_bytes += table.nbytes
        if num_bytes >= DEAL_BYTES:
            yield pa.concat_tables(parts)
            parts, num_bytes = [], 0
    if parts:
        yield pa.concat_tables(parts)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="undula-shuffle-") as folder:
        try:
            yield Path(folder)
        except OSError as error:
            raise StorageError(
                f"cannot shuffle in {folder}: {error.strerror or error}; set TMPDIR to a folder with as much space as the rows take "
                "in memory"
            ) from error
