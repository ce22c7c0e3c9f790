"""Read tasks of Ray Data. Each task reads the rows of some shuffle windows in stored order. Their processes do not need torch."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from traceback import format_exception

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from undula.data.stored.cache import DiskCache
from undula.data.stored.manifest import ID_COLUMN, Column, Manifest
from undula.data.stored.maps import SampleMap
from undula.data.stored.shards import Shard
from undula.data.stored.sizes import RowSizes, fixed_bytes
from undula.plan.order import Window
from undula.storage import Reporter, waits_reported_to, waits_reporter

LOCAL_READS, REMOTE_READS = 2, 4
"""Number of row groups that a task reads concurrently from a disk and from S3. Some of them are fetched while another is decoded."""


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


def window_read(
    manifest: Manifest,
    columns: tuple[Column, ...],
    window: Window,
    sample_map: SampleMap | None = None,
    cache: DiskCache | None = None,
    sizes: RowSizes | None = None,
) -> WindowRead:
    """Return the read of a window's rows. `sizes` are the sizes of the columns, if the caller has them already."""
    sizes = sizes or RowSizes(manifest, columns, cache)
    ranges = []
    for rows in window.ranges:
        number, group = manifest.row_group_places[rows.row_group]
        file = manifest.files[number]
        ranges.append(
            RangeRead(
                shard=Shard(manifest.store, file.name, file.bytes, file.version, cache),
                row_group=group,
                start=rows.start,
                stop=rows.stop,
                first_id=int(manifest.first_ids[rows.row_group]),
                num_bytes=sizes.decoded(rows.row_group, rows.num_rows),
                row_group_bytes=sizes.decoded(rows.row_group, file.row_groups[group]),
            )
        )
    return WindowRead(columns, sample_map, window, tuple(ranges))


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


class ReadTaskError(Exception):
    """Exception of a read task and its traceback.

    Ray Data appends advice about its own settings to the arguments of the exceptions that it sees (Ray 2.60, `iterate_with_retry`).
    """

    def __init__(self, traceback: str, original: Exception):
        super().__init__(traceback, original)

    @property
    def original(self) -> Exception:
        """Exception as it was raised, but without its traceback, because exceptions are pickled without it."""
        original: Exception = self.args[1]
        return original

    def __str__(self) -> str:
        return str(self.args[0])


class WindowDatasource(Datasource):
    """Ray Data source that reads the given windows in order. A table that it returns can end within a window.

    Args:
        reads: Reads of the windows.
        task_bytes: Maximum memory in bytes that one task takes, unless a single row group takes more. A task has an overhead of about
            20 ms.
    """

    def __init__(self, reads: Sequence[WindowRead], task_bytes: int):
        reporter = waits_reporter()
        self._tasks = [
            _Task(tuple(group), task_bytes, reporter) for group in _grouped(row_group_reads(reads), task_bytes)
        ]

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    @property
    def task_rows(self) -> list[int]:
        """Number of rows of each task."""
        return [sum(read.rows.num_rows for read in task.reads) for task in self._tasks]

    def dealt(self, count: int) -> list["WindowDatasource"]:
        """Deal the tasks one by one to `count` sources."""
        sources = [copy(self) for _ in range(count)]
        for number, source in enumerate(sources):
            source._tasks = self._tasks[number::count]
        return sources

    def concurrency(self, num_bytes: int) -> int:
        """Return how many tasks can run at the same time within an amount of memory in bytes, but at least one."""
        largest = max(task.peak_bytes for task in self._tasks)
        return max(min(num_bytes // largest, self.num_tasks), 1)

    def get_name(self) -> str:
        return "Windows"

    def estimate_inmemory_data_size(self) -> int:
        return sum(read.num_bytes for task in self._tasks for read in task.reads)

    def get_read_tasks(self, parallelism: int, *args: object, **kwargs: object) -> list[ReadTask]:
        return [
            ReadTask(
                task,
                BlockMetadata(
                    num_rows=sum(read.rows.num_rows for read in task.reads),
                    size_bytes=sum(read.num_bytes for read in task.reads),
                    input_files=None,
                    exec_stats=None,
                ),
            )
            for task in self._tasks
        ]


def _copied(table: pa.Table) -> pa.Table:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="undula-read")


@dataclass(frozen=True)
class _Task:
    reads: tuple[RowGroupRead, ...]
    most_bytes: int
    reporter: Reporter | None
    """Callback of the process that wants the rows, to which outages of the store and lost caches are reported."""

    @property
    def peak_bytes(self) -> int:
        return sum(read.peak_bytes for read in self.reads)

    def __call__(self) -> Iterable[pa.Table]:
        try:
            with waits_reported_to(self.reporter):
                yield from tables(self.reads, self.most_bytes)
        except Exception as error:
            raise ReadTaskError("".join(format_exception(error)), error) from error


def _grouped(reads: Iterable[RowGroupRead], most_bytes: int) -> Iterator[list[RowGroupRead]]:
    """Yield consecutive reads that together take at most `most_bytes` of memory, or a single one. Ray Data holds all rows of a task."""
    group: list[RowGroupRead] = []
    num_bytes = 0
    for read in reads:
        if group and num_bytes + read.peak_bytes > most_bytes:
            yield group
            group, num_bytes = [], 0
        group.append(read)
        num_bytes += read.peak_bytes
    if group:
        yield group
