"""The stream of a rank: Ray Data reads just the windows that its virtual workers need, in the plan's order, from any step on."""

import threading
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa
import ray.data

from undula.data.cache import DiskCache
from undula.data.manifest import Manifest
from undula.data.maps import SampleFunction, SampleMap
from undula.data.read import WindowDatasource, WindowRead, window_read
from undula.data.rows import Samples, WindowRows, concatenated
from undula.data.spec import DataSpec
from undula.plan.keys import key64
from undula.plan.order import EpochOrder, Window
from undula.plan.plan import Plan

T = TypeVar("T")


class RankStream:
    """Samples of some virtual workers of one data set, epoch after epoch, each virtual worker's in the order of its own stream.

    Args:
        manifest: the data set.
        plan: how it is cut into streams.
        positions: for each virtual worker of this rank, how many samples of the run it has consumed.
        spec: columns, and how far to read ahead.
        function: applied to each sample where it is read.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: Plan,
        positions: Mapping[int, int],
        spec: DataSpec,
        function: SampleFunction | None = None,
    ):
        self._manifest = manifest
        self._plan = plan
        self._spec = spec
        self._columns = manifest.select(spec.columns)
        self._function = function
        self._cache = DiskCache(spec.cache.folder, int(spec.cache.max_gib * 2**30)) if spec.cache else None
        self._blocks: _ReadAhead[_Block] | None = None
        self._queues: dict[int, deque[_Block]] = {virtual_worker: deque() for virtual_worker in positions}
        self._places = {
            virtual_worker: divmod(position, plan.consumed(virtual_worker))
            for virtual_worker, position in positions.items()
        }

    def open(self) -> None:
        """Begin to read, so that the first samples are there when they are asked for."""
        if self._blocks is None:
            self._blocks = _ReadAhead(self._read_on(dict(self._places)))

    def take(self, virtual_worker: int, count: int) -> Samples:
        """The next `count` samples of a virtual worker."""
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
        """Up to `count` rows of the data set, for a rank whose share of a short step is empty."""
        order = EpochOrder(self._plan, self._manifest.row_counts, epoch=0)
        read = self._read(next(order.windows(next(iter(self._places)))), epoch=0)
        return WindowRows(read, [read()]).take(0, min(count, read.num_rows))

    def close(self) -> None:
        """Stop reading ahead."""
        if self._blocks:
            self._blocks.close()
        self._blocks = None

    def _current(self, virtual_worker: int) -> tuple[WindowRows, int]:
        """The window in which a virtual worker's stream stands, and the place in it."""
        queue, (epoch, position) = self._queues[virtual_worker], self._places[virtual_worker]
        while queue and (queue[0].epoch < epoch or queue[0].rows.start + queue[0].rows.num_rows <= position):
            queue.popleft()
        while not queue:
            assert self._blocks is not None
            block = next(self._blocks)
            self._queues[block.virtual_worker].append(block)
        return queue[0].rows, position - queue[0].rows.start

    def _read_on(self, places: dict[int, tuple[int, int]]) -> Generator["_Block", None, None]:
        """The windows from some places on, one epoch after another, so that an epoch's first are there when the last one's end."""
        for epoch in range(min(epoch for epoch, _ in places.values()), self._plan.num_epochs):
            starts = {
                virtual_worker: position if first == epoch else 0
                for virtual_worker, (first, position) in places.items()
                if first <= epoch
            }
            for read, rows in _windows(self._reads(epoch, starts), self._spec):
                yield _Block(read.window.virtual_worker, epoch, rows)

    def _reads(self, epoch: int, starts: Mapping[int, int]) -> list[WindowRead]:
        """The windows of an epoch from places of the streams on, in the order in which steps first need them."""
        order = EpochOrder(self._plan, self._manifest.row_counts, epoch)
        share = self._plan.virtual_worker_batch
        needed = [
            (max(window.start, position) // share, virtual_worker, window)
            for virtual_worker, position in starts.items()
            for window in order.windows(virtual_worker, position)
        ]
        needed.sort(key=lambda each: each[:2])
        return [self._read(window, epoch) for _, _, window in needed]

    def _read(self, window: Window, epoch: int) -> WindowRead:
        sample_map = None
        if self._function:
            sample_map = SampleMap(self._function, key64("map", self._plan.spec.seed, epoch))
        return window_read(self._manifest, self._columns, window, sample_map, self._cache)


@dataclass(frozen=True)
class _Block:
    virtual_worker: int
    epoch: int
    rows: WindowRows


class _ReadAhead(Generic[T]):
    """Runs a generator in a thread, one item ahead of who takes them."""

    def __init__(self, items: Generator[T, None, None]):
        self._items = items
        self._ready: Queue[T | BaseException] = Queue(maxsize=1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="undula-read-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._closed.set()
        while self._thread.is_alive():
            with suppress(Empty):  # the thread may wait for room
                self._ready.get(timeout=0.05)
        self._items.close()

    def _run(self) -> None:
        try:
            for item in self._items:
                self._ready.put(item)
                if self._closed.is_set():
                    return
            self._ready.put(AssertionError("more was taken than there is"))
        except BaseException as error:
            self._ready.put(error)


def _windows(reads: list[WindowRead], spec: DataSpec) -> Generator[tuple[WindowRead, WindowRows], None, None]:
    """The rows of each read, in order: the head of them read here, while the processes of Ray Data's tasks start."""
    end_bytes = np.cumsum([read.num_bytes for read in reads])
    head = max(int(np.searchsorted(end_bytes, spec.head_mib * 2**20, side="right")), min(spec.head_mib, 1))
    tables = _ReadAhead(_tables(reads[head:], spec)) if reads[head:] else None
    try:
        for read in reads[:head]:
            yield read, WindowRows(read, [read()])
        rest = pa.table({})
        for read in reads[head:]:
            assert tables is not None
            parts: list[pa.Table] = []
            missing = read.num_rows
            while missing:  # Ray Data joins and cuts tables as it sees fit
                rest = rest if rest.num_rows else next(tables)
                parts.append(rest.slice(0, missing))
                missing -= parts[-1].num_rows
                rest = rest.slice(parts[-1].num_rows)
            yield read, WindowRows(read, parts)
    finally:
        if tables:
            tables.close()


def _tables(reads: list[WindowRead], spec: DataSpec) -> Generator[pa.Table, None, None]:
    """The rows of the reads, in order, by tasks of Ray Data."""
    prefetch_bytes = spec.prefetch_mib * 2**20
    source = WindowDatasource(
        reads, prefetch_bytes // (2 * spec.read_tasks)
    )  # the running ones bring half of what may wait
    dataset = ray.data.read_datasource(
        source,
        override_num_blocks=source.num_tasks,
        concurrency=min(spec.read_tasks, source.num_tasks),  # more would only be warned of
        num_cpus=spec.read_cpus,
    )
    options = dataset.context.execution_options
    options.preserve_order = True
    options.resource_limits = ray.data.ExecutionResources(object_store_memory=prefetch_bytes)
    dataset.context.enable_progress_bars = False
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
