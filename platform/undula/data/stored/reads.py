"""Reads of shuffle windows: which rows of which row groups they are, and the tables of these rows, several read at the same time."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import prod

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from undula.data.stored.cache import DiskCache
from undula.data.stored.manifest import ID_COLUMN, TEXT_TYPES, Column, Manifest
from undula.data.stored.maps import SampleMap
from undula.data.stored.shards import Shard
from undula.plan.order import RowRange, Window

LOCAL_READS, REMOTE_READS = 2, 4
"""Number of row groups that are read concurrently from a disk and from S3. Some of them are fetched while another is decoded."""


@dataclass(frozen=True)
class RangeRead:
    """Read of the rows [start, stop) of one row group."""

    shard: Shard
    row_group: int
    """Index of the row group in the shard."""
    start: int
    stop: int
    first_id: int
    """Id of the first row of the row group."""
    num_bytes: int
    """Estimated size of the decoded rows in bytes."""
    row_group_bytes: int
    """Estimated size of the whole decoded row group in bytes. Parquet cannot decode a part of it."""

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def ids(self) -> NDArray[np.int64]:
        """Return the ids of the rows; shape [num_rows]."""
        return np.arange(self.start, self.stop, dtype=np.int64) + self.first_id

    def continues_in(self, other: "RangeRead") -> bool:
        """Return whether the rows of another range follow those of this one in the same row group."""
        return self.first_id == other.first_id and self.stop == other.start

    def joined(self, other: "RangeRead") -> "RangeRead":
        """Return the range of the rows of this range and of another one that continues it."""
        return replace(self, stop=other.stop, num_bytes=self.num_bytes + other.num_bytes)


@dataclass(frozen=True)
class WindowRead:
    """Read of a window. A call returns the window's rows in stored order and their ids, as one table."""

    columns: tuple[Column, ...]
    map: SampleMap | None
    window: Window
    ranges: tuple[RangeRead, ...]
    epoch: int
    """Epoch of the run that needs the rows."""

    @property
    def num_rows(self) -> int:
        return self.window.num_rows

    @property
    def num_bytes(self) -> int:
        """Estimated size of the decoded rows in bytes."""
        return sum(rows.num_bytes for rows in self.ranges)

    def ids(self) -> NDArray[np.int64]:
        """Return the ids of the rows, in stored order; shape [num_rows]."""
        return np.concatenate([rows.ids() for rows in self.ranges])

    def __call__(self) -> pa.Table:
        reads = list(row_group_reads([self]))
        return pa.concat_tables(list(tables(reads, sum(read.peak_bytes for read in reads))))


@dataclass(frozen=True)
class RowGroupRead:
    """Read of consecutive rows of one row group, which can belong to several windows."""

    columns: tuple[Column, ...]
    map: SampleMap | None
    rows: RangeRead

    @property
    def num_bytes(self) -> int:
        """Estimated size in bytes of the rows that it returns."""
        return fixed_bytes(self.map.result, self.rows.num_rows) if self.map else self.rows.num_bytes

    @property
    def peak_bytes(self) -> int:
        """Estimated memory in bytes that it takes. The argument and the result of a map are in memory together."""
        return self.rows.row_group_bytes + (self.num_bytes if self.map else 0)

    def stored(self) -> pa.Table:
        """Read the rows and their ids, before the map."""
        rows = self.rows
        table = rows.shard.row_group(rows.row_group, [column.name for column in self.columns])
        part = table.slice(rows.start, rows.num_rows)
        if 2 * part.num_rows < table.num_rows:  # a slice alone would keep the whole row group in memory
            part = _copied(part)
        return part.append_column(ID_COLUMN, pa.array(rows.ids()))

    def mapped(self, stored: pa.Table) -> pa.Table:
        """Return the result of the map for the rows that `stored` returned."""
        return self.map(stored, self.columns) if self.map else stored


class WindowReads:
    """Reads of the windows of a data set, with estimates of their decoded sizes.

    Encoded sizes can be much smaller, because Parquet stores repeated values once: masks of 100 MB can take 0.2 MB in a file. The sizes
    of numbers follow from their types. A row group is read once per process to measure text, because pyarrow does not return Parquet's
    size statistics. An estimate of whole rows is at least their encoded size, which is also in memory while they are decoded.

    Args:
        manifest: The data set.
        columns: Columns to read.
        cache: Disk cache for data from S3.
    """

    def __init__(self, manifest: Manifest, columns: tuple[Column, ...], cache: DiskCache | None = None):
        self.manifest = manifest
        self.columns = columns
        self._cache = cache
        self._is_whole = set(columns) == set(manifest.columns)

    def of(self, window: Window, epoch: int = 0, sample_map: SampleMap | None = None) -> WindowRead:
        """Return the read of a window's rows."""
        ranges = tuple(self._range(rows) for rows in window.ranges)
        return WindowRead(self.columns, sample_map, window, ranges, epoch)

    def _range(self, rows: RowRange) -> RangeRead:
        file, group = self.manifest.row_group_places[rows.row_group]
        return RangeRead(
            shard=Shard.of(self.manifest, file, self._cache),
            row_group=group,
            start=rows.start,
            stop=rows.stop,
            first_id=int(self.manifest.first_ids[rows.row_group]),
            num_bytes=self.decoded_bytes(rows.row_group, rows.num_rows),
            row_group_bytes=self.decoded_bytes(rows.row_group, int(self.manifest.row_counts[rows.row_group])),
        )

    def decoded_bytes(self, row_group: int, num_rows: int) -> int:
        """Return the estimated size in bytes of some decoded rows of a row group of the data set."""
        size = fixed_bytes(self.columns, num_rows) + round(self._text_row_bytes * num_rows)
        if not self._is_whole:
            return size
        number, group = self.manifest.row_group_places[row_group]
        file = self.manifest.files[number]
        return max(size, file.row_group_bytes[group] * num_rows // max(file.row_groups[group], 1))

    @cached_property
    def _text_row_bytes(self) -> float:
        """Mean size in bytes of a row's text in the first row group that has rows."""
        names = tuple(column.name for column in self.columns if column.type in TEXT_TYPES)
        if not names or not self.manifest.num_rows:
            return 0.0
        number, group = self.manifest.row_group_places[int(np.flatnonzero(self.manifest.row_counts)[0])]
        return _mean_row_bytes(Shard.of(self.manifest, number, self._cache), group, names)


@lru_cache(maxsize=64)
def _mean_row_bytes(shard: Shard, row_group: int, names: tuple[str, ...]) -> float:
    """Return the mean size in bytes of a row. It is kept, because each resume in this process needs it again."""
    table = shard.row_group(row_group, names)
    return float(table.nbytes / table.num_rows)


def fixed_bytes(columns: tuple[Column, ...], num_rows: int) -> int:
    """Return the size in bytes of decoded rows, without the columns of text."""
    return -(-num_rows * _row_bits(columns) // 8)


@lru_cache(maxsize=64)
def _row_bits(columns: tuple[Column, ...]) -> int:
    """Return the size in bits of a row, without its text. Arrow stores booleans as bits."""
    numbers = [column for column in columns if column.type not in TEXT_TYPES]
    return sum(prod(column.shape) * int(pa.type_for_alias(column.type).bit_width) for column in numbers)


def row_group_reads(reads: Iterable[WindowRead]) -> Iterator[RowGroupRead]:
    """Yield the reads of the rows of windows, in order.

    A range that continues the one before it is read and decoded together with it, as where several virtual workers share a row group.
    """
    last: RowGroupRead | None = None
    for read in reads:
        for rows in read.ranges:
            if last and last.map == read.map and last.rows.continues_in(rows):
                last = replace(last, rows=last.rows.joined(rows))
                continue
            if last:
                yield last
            last = RowGroupRead(read.columns, read.map, rows)
    if last:
        yield last


def tables(reads: Iterable[RowGroupRead], ahead_bytes: int) -> Iterator[pa.Table]:
    """Yield the rows of the reads in order. The next row groups are read in threads meanwhile, if they take at most `ahead_bytes`."""
    running: deque[tuple[RowGroupRead, Future[pa.Table]]] = deque()
    try:
        for read in reads:
            count = REMOTE_READS if read.rows.shard.store.is_s3 else LOCAL_READS
            while len(running) >= count or (
                running and sum(other.peak_bytes for other, _ in running) + read.peak_bytes > ahead_bytes
            ):
                yield _result(*running.popleft())
            running.append((read, _threads(count).submit(read.stored)))
        while running:
            yield _result(*running.popleft())
    finally:
        for _, future in running:
            future.cancel()


def _result(read: RowGroupRead, stored: Future[pa.Table]) -> pa.Table:
    """Return the rows of a read. The map runs here and not in the thread of the read, because it may not be thread-safe."""
    return read.mapped(stored.result())


def _copied(table: pa.Table) -> pa.Table:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="undula-read")
