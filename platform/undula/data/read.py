"""Read tasks of Ray Data: each brings the rows of some shuffle windows, as they are stored."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

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
"""Row groups that a task reads at once: some are fetched while another is decoded."""


@dataclass(frozen=True)
class PieceRead:
    """Rows [start, stop) of one row group of one shard."""

    shard: Shard
    row_group: int
    start: int
    stop: int
    first_id: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def ids(self) -> NDArray[np.int64]:
        return np.arange(self.start, self.stop, dtype=np.int64) + self.first_id


@dataclass(frozen=True)
class WindowRead:
    """How a window is read: calling it gives its rows in stored order, with their ids, as one table."""

    columns: tuple[Column, ...]
    map: SampleMap | None
    window: Window
    pieces: tuple[PieceRead, ...]
    num_bytes: int

    @property
    def num_rows(self) -> int:
        return self.window.num_rows

    def ids(self) -> NDArray[np.int64]:
        """Ids of the rows, in stored order; shape [num_rows]."""
        return np.concatenate([piece.ids() for piece in self.pieces])

    def __call__(self) -> pa.Table:
        threads = _threads(REMOTE_READS if self.pieces[0].shard.store.is_s3 else LOCAL_READS)
        table = pa.concat_tables(list(threads.map(self._read, self.pieces)))
        return self.map(table, self.columns) if self.map else table

    def _read(self, piece: PieceRead) -> pa.Table:
        table = piece.shard.row_group(piece.row_group, [column.name for column in self.columns])
        if 2 * piece.num_rows < table.num_rows:  # a slice would hold all of the row group
            table = _copied(table.slice(piece.start, piece.num_rows))
        else:
            table = table.slice(piece.start, piece.num_rows)
        return table.append_column(ID_COLUMN, pa.array(piece.ids()))


def window_read(
    manifest: Manifest,
    columns: tuple[Column, ...],
    window: Window,
    sample_map: SampleMap | None = None,
    cache: DiskCache | None = None,
) -> WindowRead:
    """The read of a window's rows."""
    pieces, num_bytes = [], 0
    for piece in window.ranges:
        number, group = manifest.row_group_places[piece.row_group]
        file = manifest.files[number]
        first_id = int(manifest.first_ids[piece.row_group])
        shard = Shard(manifest.store, file.name, file.bytes, file.version, cache)
        pieces.append(PieceRead(shard, group, piece.start, piece.stop, first_id))
        num_bytes += file.row_group_bytes[group] * piece.num_rows // max(file.row_groups[group], 1)
    return WindowRead(columns, sample_map, window, tuple(pieces), num_bytes)


class WindowDatasource(Datasource):
    """A Ray Data source that brings the given windows, in the given order.

    Args:
        reads: the windows.
        task_bytes: up to so many are read by one task, but for a window that is larger; a task costs some 20 ms beside its reading.
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
        for read in self.reads:
            yield read()


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
