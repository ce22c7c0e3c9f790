"""Stream of a rank. Ray Data reads only the windows that the rank's virtual workers need, in the plan's order, from any step on."""

import heapq
import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from undula.data.spec import DataSpec
from undula.data.stored.cache import DiskCache
from undula.data.stored.execution import executions
from undula.data.stored.manifest import Manifest
from undula.data.stored.mapped import StreamMap
from undula.data.stored.read import RangeRead, WindowRead, row_group_reads, tables, window_read
from undula.data.stored.read_ahead import ReadAhead, TaskRows
from undula.data.stored.rows import Samples, WindowRows, concatenated
from undula.data.stored.sizes import RowSizes
from undula.plan.keys import key64
from undula.plan.order import EpochOrder, Window
from undula.plan.plan import Plan

CHUNK_WINDOWS = 1024
"""Maximum number of windows in one execution of Ray Data. An execution is only planned when the previous one ends."""
HEAD_WINDOWS = 1024
"""Maximum number of windows that a worker reads itself. If files are tiny, it would take seconds to list all windows of the head."""


def disk_cache(spec: DataSpec) -> DiskCache | None:
    """Return the disk cache of a job's data, or None if the job has none."""
    return DiskCache(spec.cache.folder, int(spec.cache.max_gib * 2**30)) if spec.cache else None


class RankStream:
    """Samples of a rank's virtual workers from one data set over all epochs. Each virtual worker gets them in the order of its stream.

    Args:
        manifest: The data set.
        plan: Plan that divides the data set into streams.
        positions: For each virtual worker of this rank, the remaining positions of its stream, counted over all epochs.
        spec: Columns to read and amount to read ahead.
        sample_map: Map of the samples; None for none.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: Plan,
        positions: Mapping[int, range],
        spec: DataSpec,
        sample_map: StreamMap | None = None,
    ):
        self._manifest = manifest
        self._plan = plan
        self._spec = spec
        self._columns = manifest.select(spec.columns)
        self._map = sample_map
        self._cache = disk_cache(spec)
        self._sizes = RowSizes(manifest, self._columns, self._cache)
        self._blocks: ReadAhead[_Block] | None = None
        self._tail: _TaskBlocks | None = None
        self._orders: dict[int, EpochOrder] = {}
        self._spare: WindowRows | None = None
        self._queues: dict[int, deque[_Block]] = {virtual_worker: deque() for virtual_worker in positions}
        self._places = {
            virtual_worker: divmod(todo.start, plan.consumed(virtual_worker))
            for virtual_worker, todo in positions.items()
        }
        self._ends = {virtual_worker: todo.stop for virtual_worker, todo in positions.items()}

    def open(self) -> None:
        """Start reading ahead, so that the first samples are ready when `take` is called."""
        if self._blocks is None:
            self._blocks = ReadAhead(self._windows_from(dict(self._places)), self._end_tail)

    def take(self, virtual_worker: int, count: int) -> Samples:
        """Return the next `count` samples of a virtual worker."""
        self.open()
        parts: list[Samples] = []
        while count:
            rows, place = self._current(virtual_worker)
            epoch, position = self._places[virtual_worker]
            taken = min(count, rows.num_rows - place, self._plan.consumed(virtual_worker) - position)
            parts.append(rows.take(place, place + taken))
            position += taken
            is_over = position == self._plan.consumed(virtual_worker)
            self._places[virtual_worker] = (epoch + 1, 0) if is_over else (epoch, position)
            count -= taken
        return concatenated(parts)

    def any_rows(self, count: int) -> Samples:
        """Return `count` arbitrary rows of the data set, some of them twice if need be, for a rank whose share of a short step is empty."""
        if self._spare is None:
            order = EpochOrder(
                self._plan, self._manifest.row_counts, 0
            )  # self._orders belongs to the thread that reads ahead
            read = self._read(next(order.windows(next(iter(self._places)))), epoch=0)
            self._spare = WindowRows(read, [read()])
        rows = self._spare.take(0, min(count, self._spare.num_rows))
        return rows if len(rows.ids) == count else rows.at(np.arange(count) % len(rows.ids))

    def close(self) -> None:
        """Stop reading ahead."""
        if self._blocks:
            self._blocks.close()
        self._tail = None
        self._blocks, self._queues = None, {virtual_worker: deque() for virtual_worker in self._places}

    def _current(self, virtual_worker: int) -> tuple[WindowRows, int]:
        """Return the current window of a virtual worker's stream and the position in the window."""
        queue, (epoch, position) = self._queues[virtual_worker], self._places[virtual_worker]
        while queue and (queue[0].epoch < epoch or queue[0].rows.start + queue[0].rows.num_rows <= position):
            queue.popleft()
        while not queue:
            assert self._blocks is not None
            block = next(self._blocks)
            self._queues[block.virtual_worker].append(block)
        return queue[0].rows, position - queue[0].rows.start

    def _windows_from(self, places: dict[int, tuple[int, int]]) -> Generator["_Block", None, None]:
        """Yield the windows from the given places on, across epochs, in the order in which the steps need them.

        This process reads the first windows, the head, itself. Ray Data's worker processes take CPU time from training while they start,
        so they only start after half of the head: a run on a cluster that changes often may never need them.
        """
        needed = heapq.merge(*(self._needed(v, *place) for v, place in places.items()), key=lambda need: need[:2])
        todo: Iterator[_Need] = (
            _Need(virtual_worker, epoch, self._read(window, epoch)) for _, virtual_worker, epoch, window in needed
        )
        head_bytes = self._spec.head_mib * 2**20
        head, todo = _split(todo, head_bytes)
        try:
            rows = tables(row_group_reads(need.read for need in head), head_bytes)
            for place, block in enumerate(_blocks(head, rows)):
                if place == len(head) // 2:
                    self._tail = _TaskBlocks(todo, self._spec)
                yield block
            self._tail = self._tail or _TaskBlocks(todo, self._spec)
            yield from self._tail
        finally:
            self._end_tail()

    def _end_tail(self) -> None:
        if self._tail:
            self._tail.close()

    def _needed(self, virtual_worker: int, epoch: int, position: int) -> Iterator[tuple[int, int, int, Window]]:
        """Yield a virtual worker's windows to the end of the run, as (steps until the window is needed, virtual worker, epoch, window)."""
        length, end = self._plan.consumed(virtual_worker), self._ends[virtual_worker]
        begin = epoch * length + position
        while epoch * length + position < end:
            for window in self._order(epoch).windows(virtual_worker, position):
                place = epoch * length + max(window.start, position)
                if place >= end:
                    return
                yield (place - begin) // self._plan.virtual_worker_batch, virtual_worker, epoch, window
            epoch, position = epoch + 1, 0

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            # In a mix, each virtual worker can be in a different epoch.
            while len(self._orders) > 2 * len(self._places):
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = EpochOrder(self._plan, self._manifest.row_counts, epoch)
        return self._orders[epoch]

    def _read(self, window: Window, epoch: int) -> WindowRead:
        sample_map = None
        if self._map:
            sample_map = self._map.keyed(key64("map", self._plan.spec.seed, epoch), self._manifest.url)
        return window_read(self._manifest, self._columns, window, sample_map, self._cache, self._sizes)


@dataclass(frozen=True)
class _Block:
    virtual_worker: int
    epoch: int
    rows: WindowRows


@dataclass(frozen=True)
class _Need:
    virtual_worker: int
    epoch: int
    read: WindowRead

    def block(self, tables: list[pa.Table]) -> _Block:
        return _Block(self.virtual_worker, self.epoch, WindowRows(self.read, tables))


class _TaskBlocks:
    """Blocks that Ray Data's tasks read, in order. The tasks start at once."""

    def __init__(self, needs: Iterator[_Need], spec: DataSpec):
        self._needs = needs
        self._spec = spec
        self._rows: TaskRows | None = None
        self._chunk = self._begin()

    def __iter__(self) -> Iterator[_Block]:
        while self._rows:
            while self._chunk:
                need = self._chunk.popleft()
                yield need.block(self._rows.take(need.read))
            self.close()
            self._chunk = self._begin()

    def close(self) -> None:
        """Cancel the tasks."""
        if self._rows:
            self._rows.close()

    def _begin(self) -> deque[_Need]:
        chunk = deque(itertools.islice(self._needs, CHUNK_WINDOWS))
        self._rows = TaskRows(*executions([need.read for need in chunk], self._spec)) if chunk else None
        return chunk


def _split(needs: Iterator[_Need], num_bytes: int) -> tuple[list[_Need], Iterator[_Need]]:
    """Split reads into those at the front, until they exceed `num_bytes` of memory or HEAD_WINDOWS, and the rest.

    The front also has the reads that only continue its last row group, so that it is not decoded again.
    """
    front: list[_Need] = []
    last: RangeRead | None = None
    for need in needs:
        ranges = need.read.ranges
        new = ranges[1:] if last and last.continues_in(ranges[0]) else ranges
        if new and (num_bytes <= 0 or len(front) >= HEAD_WINDOWS):
            return front, itertools.chain([need], needs)
        front.append(need)
        num_bytes -= sum(rows.row_group_bytes for rows in new)
        last = ranges[-1]
    return front, needs


def _blocks(needs: Iterable[_Need], rows: Iterator[pa.Table]) -> Iterator[_Block]:
    """Yield the windows in order. The tables have their rows in order, but do not align with the windows."""
    rest = pa.table({})
    for need in needs:
        parts: list[pa.Table] = []
        missing = need.read.num_rows
        while missing:
            rest = rest if rest.num_rows else next(rows)
            parts.append(rest.slice(0, missing))
            missing -= parts[-1].num_rows
            rest = rest.slice(parts[-1].num_rows)
        yield need.block(parts)
