"""Windows of a rank with their rows, in the order in which the steps need them, from any position on.

The process of the rank reads the first windows, the head, itself. Ray Data's worker processes take CPU time from training while they start,
so they only start after half of the head: a run on a cluster that changes often may never need them.

Also here: map of the samples of a stream. The columns of its results are fixed before the first window is read, and are the same in every
process.

The first row of the data decides, and not the first row that a rank happens to read: that would depend on the world size and on the step
from which the run resumes.
"""

import heapq
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from undula.data.spec import DataSpec
from undula.data.stored.manifest import Column
from undula.data.stored.maps import SampleFunction, SampleMap, result_columns
from undula.data.stored.reads import RangeRead, WindowRead, WindowReads, row_group_reads, tables
from undula.data.stored.rows import WindowRows
from undula.plan.keys import key64
from undula.plan.order import EpochOrder, RowRange, Window
from undula.plan.plan import Plan

if TYPE_CHECKING:
    from undula.data.stored.tasks import TaskRows


class StreamMap:
    """Function that a stream applies to its samples.

    Args:
        function: Function applied to each sample when it is read.
        key: Key of the random generators for the first row.
        reads: Reads of the data set with the first row of the data.
    """

    def __init__(self, function: SampleFunction, key: int, reads: WindowReads):
        self._function = function
        self._key = key
        self._reads = reads

    def keyed(self, key: int, url: str) -> SampleMap:
        """Return the map of the data set at `url`, with its random generators keyed by `key`.

        Raises:
            ManifestError: The first row of the data cannot be read.
            UsageError: The function returns values for it that batches cannot hold.
        """
        return SampleMap(self._function, key, url, self._result)

    @cached_property
    def _result(self) -> tuple[Column, ...]:
        manifest = self._reads.manifest
        row_group = int(np.flatnonzero(manifest.row_counts)[0])
        window = Window(virtual_worker=0, start=0, ranges=(RowRange(row_group, 0, 1),), key=None)
        row = _row(self._reads.of(window))
        return result_columns(self._function, self._key, manifest.url, row, self._reads.columns)


@lru_cache(maxsize=8)
def _row(read: WindowRead) -> pa.Table:
    """Return the row that a read has. It is kept, because the next worker group of this process and each validation need it again."""
    return read()


CHUNK_WINDOWS = 1024
"""Maximum number of windows in one execution of Ray Data. An execution is only planned when the previous one ends."""
HEAD_WINDOWS = 1024
"""Maximum number of windows that a worker reads itself. If files are tiny, it would take seconds to list all windows of the head."""


def needed_windows(
    reads: WindowReads, plan: Plan, positions: Mapping[int, range], sample_map: StreamMap | None
) -> Iterator[WindowRead]:
    """Yield the reads of the windows that a rank needs, across epochs, in the order in which the steps need them.

    Args:
        reads: Reads of the windows of the data set.
        plan: Plan that divides the data set into streams.
        positions: For each virtual worker of the rank, the remaining positions of its stream, counted over all epochs.
        sample_map: Map of the samples; None for none.
    """
    manifest = reads.manifest
    # In a mix, each virtual worker can be in a different epoch.
    order_of = lru_cache(2 * len(positions) + 1)(partial(EpochOrder, plan, manifest.row_counts))
    of_workers = [_of_worker(order_of, plan, virtual_worker, todo) for virtual_worker, todo in positions.items()]
    for _, _, epoch, window in heapq.merge(*of_workers, key=lambda need: need[:2]):
        keyed = sample_map.keyed(key64("map", plan.spec.seed, epoch), manifest.url) if sample_map else None
        yield reads.of(window, epoch, keyed)


def _of_worker(
    order_of: Callable[[int], EpochOrder], plan: Plan, virtual_worker: int, todo: range
) -> Iterator[tuple[int, int, int, Window]]:
    """Yield the windows of a virtual worker, as (steps until the window is needed, virtual worker, epoch, window)."""
    length, begin = plan.consumed(virtual_worker), todo.start
    while begin < todo.stop:
        epoch, position = divmod(begin, length)
        for window in order_of(epoch).windows(virtual_worker, position):
            place = epoch * length + max(window.start, position)
            if place >= todo.stop:
                return
            yield (place - todo.start) // plan.virtual_worker_batch, virtual_worker, epoch, window
        begin = (epoch + 1) * length


class WindowReader:
    """Reader of the rows of windows, in order. One thread iterates over it, and any other may interrupt it.

    Args:
        reads: Reads of the windows.
        spec: Amount to read ahead.
    """

    def __init__(self, reads: Iterator[WindowRead], spec: DataSpec):
        self._reads = reads
        self._spec = spec
        self._chunk: list[WindowRead] = []
        self._tasks: TaskRows | None = None
        """Rows of the windows of the chunk; None before the first chunk and after the last one."""

    def __iter__(self) -> Generator[WindowRows, None, None]:
        try:
            yield from self._read_head()
            if not self._spec.read_tasks:
                yield from self._read_here()
            if self._tasks is None:
                self._start_tasks()
            while self._tasks:
                for read in self._chunk:
                    yield WindowRows(read, self._tasks.take(read))
                self._tasks.close()
                self._start_tasks()
        finally:
            self.interrupt()

    def interrupt(self) -> None:
        """Cancel the tasks, so that a wait for their rows ends."""
        if self._tasks:
            self._tasks.close()

    def _read_head(self) -> Iterator[WindowRows]:
        head_bytes = self._spec.head_mib * 2**20
        head, self._reads = _split(self._reads, head_bytes)
        for place, rows in enumerate(_cut(head, tables(row_group_reads(head), head_bytes))):
            if place == len(head) // 2:
                self._start_tasks()
            yield rows

    def _read_here(self) -> Iterator[WindowRows]:
        while chunk := list(itertools.islice(self._reads, CHUNK_WINDOWS)):
            yield from _cut(chunk, tables(row_group_reads(chunk), self._spec.prefetch_mib * 2**20))

    def _start_tasks(self) -> None:
        if not self._spec.read_tasks:
            return
        from undula.data.stored.tasks import TaskRows, executions  # which import Ray

        self._chunk = list(itertools.islice(self._reads, CHUNK_WINDOWS))
        self._tasks = TaskRows(*executions(self._chunk, self._spec)) if self._chunk else None


def _split(reads: Iterator[WindowRead], num_bytes: int) -> tuple[list[WindowRead], Iterator[WindowRead]]:
    """Split reads into those at the front, until they exceed `num_bytes` of memory or HEAD_WINDOWS, and the rest.

    The front also has the reads that only continue its last row group, so that it is not decoded again.
    """
    front: list[WindowRead] = []
    last: RangeRead | None = None
    for read in reads:
        ranges = read.ranges
        new = ranges[1:] if last and last.continues_in(ranges[0]) else ranges
        if new and (num_bytes <= 0 or len(front) >= HEAD_WINDOWS):
            return front, itertools.chain([read], reads)
        front.append(read)
        num_bytes -= sum(rows.row_group_bytes for rows in new)
        last = ranges[-1]
    return front, reads


def _cut(reads: Iterable[WindowRead], rows: Iterator[pa.Table]) -> Iterator[WindowRows]:
    """Yield the windows in order. The tables have their rows in order, but do not align with the windows."""
    rest = pa.table({})
    for read in reads:
        parts: list[pa.Table] = []
        missing = read.num_rows
        while missing:
            rest = rest if rest.num_rows else next(rows)
            parts.append(rest.slice(0, missing))
            missing -= parts[-1].num_rows
            rest = rest.slice(parts[-1].num_rows)
        yield WindowRows(read, parts)
