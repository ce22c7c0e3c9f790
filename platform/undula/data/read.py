"""Read tasks of Ray Data. Each task reads the rows of some shuffle windows in stored order. Their processes do not need torch."""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from traceback import format_exception

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from undula.data.cache import DiskCache
from undula.data.manifest import ID_COLUMN, Column, Manifest
from undula.data.maps import SampleMap
from undula.data.shards import Shard
from undula.plan.order import Window

LOCAL_READS, REMOTE_READS = 2, 4
"""Number of row groups that a task reads concurrently from a disk and from S3. Some of them are fetched while another is decoded."""
STEP_INTERVAL_S = 0.05
"""Minimum time in seconds between two steps of Ray Data's scheduling loop."""


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

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def ids(self) -> NDArray[np.int64]:
        """Return the ids of the rows; shape [num_rows]."""
        return np.arange(self.start, self.stop, dtype=np.int64) + self.first_id


@dataclass(frozen=True)
class WindowRead:
    """Read of a window. A call returns the window's rows in stored order and their ids, as one table."""

    columns: tuple[Column, ...]
    map: SampleMap | None
    window: Window
    ranges: tuple[RangeRead, ...]
    num_bytes: int
    """Estimated uncompressed size of the rows in bytes."""

    @property
    def num_rows(self) -> int:
        return self.window.num_rows

    def ids(self) -> NDArray[np.int64]:
        """Return the ids of the rows, in stored order; shape [num_rows]."""
        return np.concatenate([rows.ids() for rows in self.ranges])

    def __call__(self) -> pa.Table:
        threads = _threads(REMOTE_READS if self.ranges[0].shard.store.is_s3 else LOCAL_READS)
        table = pa.concat_tables(list(threads.map(self._read, self.ranges)))
        return self.map(table, self.columns) if self.map else table

    def _read(self, rows: RangeRead) -> pa.Table:
        table = rows.shard.row_group(rows.row_group, [column.name for column in self.columns])
        if 2 * rows.num_rows < table.num_rows:  # a slice alone would keep the whole row group in memory
            table = _copied(table.slice(rows.start, rows.num_rows))
        else:
            table = table.slice(rows.start, rows.num_rows)
        return table.append_column(ID_COLUMN, pa.array(rows.ids()))


def window_read(
    manifest: Manifest,
    columns: tuple[Column, ...],
    window: Window,
    sample_map: SampleMap | None = None,
    cache: DiskCache | None = None,
) -> WindowRead:
    """Return the read of a window's rows."""
    ranges, num_bytes = [], 0
    for rows in window.ranges:
        number, group = manifest.row_group_places[rows.row_group]
        file = manifest.files[number]
        first_id = int(manifest.first_ids[rows.row_group])
        shard = Shard(manifest.store, file.name, file.bytes, file.version, cache)
        ranges.append(RangeRead(shard, group, rows.start, rows.stop, first_id))
        num_bytes += file.row_group_bytes[group] * rows.num_rows // max(file.row_groups[group], 1)
    return WindowRead(columns, sample_map, window, tuple(ranges), num_bytes)


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
    """Ray Data source that reads the given windows in order.

    Args:
        reads: Reads of the windows.
        task_bytes: Maximum number of bytes that one task reads, unless a single window is larger. A task has an overhead of about 20 ms.
    """

    def __init__(self, reads: Sequence[WindowRead], task_bytes: int):
        self._tasks = list(_grouped(reads, task_bytes))

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def get_name(self) -> str:
        return "Windows"

    def estimate_inmemory_data_size(self) -> int:
        return sum(read.num_bytes for task in self._tasks for read in task.reads)

    def get_read_tasks(self, parallelism: int, *args: object, **kwargs: object) -> list[ReadTask]:
        return [
            ReadTask(
                task,
                BlockMetadata(
                    num_rows=sum(read.num_rows for read in task.reads),
                    size_bytes=sum(read.num_bytes for read in task.reads),
                    input_files=None,
                    exec_stats=None,
                ),
            )
            for task in self._tasks
        ]


class RateLimit:
    """Callback that limits Ray Data's scheduling loop to twenty steps per second.

    The loop only blocks while tasks run. When all rows are read and wait for training to take them, no task runs, and the loop would
    take a whole core of the training process (Ray 2.60, StreamingExecutor.run). The methods are those of Ray Data's
    `ExecutionCallback`; this class does not derive from it because it is private. Ray Data sends the class to
    the read tasks, which import this module.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()

    def before_execution_starts(self, executor: object) -> None: ...

    def on_execution_step(self, executor: object) -> None:
        time.sleep(max(STEP_INTERVAL_S - (time.monotonic() - self._last), 0.0))
        self._last = time.monotonic()

    def after_execution_succeeds(self, executor: object) -> None: ...

    def after_execution_fails(self, executor: object, error: Exception) -> None: ...


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
    reads: tuple[WindowRead, ...]

    def __call__(self) -> Iterable[pa.Table]:
        try:
            for read in self.reads:
                yield read()
        except Exception as error:
            raise ReadTaskError("".join(format_exception(error)), error) from error


def _grouped(reads: Sequence[WindowRead], task_bytes: int) -> Iterator[_Task]:
    group: list[WindowRead] = []
    num_bytes = 0
    for read in reads:
        if group and num_bytes + read.num_bytes > task_bytes:
            yield _Task(tuple(group))
            group, num_bytes = [], 0
        group.append(read)
        num_bytes += read.num_bytes
    if group:
        yield _Task(tuple(group))
