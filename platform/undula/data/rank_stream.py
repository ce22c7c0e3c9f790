"""The stream of a rank: Ray Data reads just the windows that its virtual workers need, in the plan's order, from any step on."""

import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from queue import Empty, Queue

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


class RankStream:
    """Samples of some virtual workers from a step on, to be taken in the order of steps and virtual workers.

    Args:
        manifest: the data set.
        plan: what each step consumes.
        virtual_workers: those of this rank.
        spec: columns, and how many read tasks run ahead.
        start: step, counted over the whole run, whose samples come first.
        function: applied to each sample where it is read.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: Plan,
        virtual_workers: range,
        spec: DataSpec,
        start: int = 0,
        function: SampleFunction | None = None,
    ):
        self._manifest = manifest
        self._plan = plan
        self._virtual_workers = virtual_workers
        self._spec = spec
        self._columns = manifest.select(spec.columns)
        self._epoch = -1
        self._start = start
        self._function = function
        self._cache = DiskCache(spec.cache.folder, int(spec.cache.max_gib * 2**30)) if spec.cache else None
        self._blocks: _ReadAhead | None = None
        self._windows: dict[int, deque[WindowRows]] = {}
        self._positions: dict[int, int] = {}

    def open(self) -> None:
        """Begin to read what `start` needs, so that it is there when the first step asks."""
        if self._start < self._plan.total_steps:
            shape = self._plan.step(self._start)
            self._open(shape.epoch, shape.step_in_epoch)

    def take(self, step: int, virtual_worker: int, count: int) -> Samples:
        """The next `count` samples of a virtual worker, which are those of `step`."""
        shape = self._plan.step(step)
        if shape.epoch != self._epoch:
            self._open(shape.epoch, shape.step_in_epoch if step == self._start else 0)
        parts: list[Samples] = []
        while count:
            rows, place = self._current(virtual_worker)
            stop = min(place + count, rows.num_rows)
            parts.append(rows.take(place, stop))
            self._positions[virtual_worker] += stop - place
            count -= stop - place
        return concatenated(parts)

    def _current(self, virtual_worker: int) -> tuple[WindowRows, int]:
        """The window in which a virtual worker's stream stands, and the place in it."""
        queue, position = self._windows[virtual_worker], self._positions[virtual_worker]
        while queue and queue[0].start + queue[0].num_rows <= position:
            queue.popleft()
        while not queue:
            assert self._blocks is not None
            read, rows = next(self._blocks)
            self._windows[read.window.virtual_worker].append(rows)
        return queue[0], position - queue[0].start

    def any_rows(self, count: int) -> Samples:
        """Up to `count` rows of the data set, for a rank whose share of a short step is empty."""
        order = EpochOrder(self._plan, self._manifest.row_counts, epoch=0)
        read = self._read(next(order.windows(self._virtual_workers[0])), epoch=0)
        return WindowRows(read, [read()]).take(0, min(count, read.num_rows))

    def close(self) -> None:
        """Stop reading ahead."""
        if self._blocks:
            self._blocks.close()
        self._blocks, self._windows = None, {}

    def _open(self, epoch: int, step_in_epoch: int) -> None:
        self.close()
        self._epoch = epoch
        self._windows = {virtual_worker: deque() for virtual_worker in self._virtual_workers}
        position = step_in_epoch * self._plan.virtual_worker_batch
        self._positions = dict.fromkeys(self._virtual_workers, position)
        self._blocks = _ReadAhead(_windows(self._reads(epoch, position), self._spec))

    def _reads(self, epoch: int, position: int) -> list[WindowRead]:
        """The windows that are left of an epoch from a position of the streams on, in the order in which steps first need them."""
        order = EpochOrder(self._plan, self._manifest.row_counts, epoch)
        share = self._plan.virtual_worker_batch
        reads = [
            self._read(window, epoch)
            for virtual_worker in self._virtual_workers
            for window in order.windows(virtual_worker, position)
        ]
        return sorted(reads, key=lambda read: (max(read.window.start, position) // share, read.window.virtual_worker))

    def _read(self, window: Window, epoch: int) -> WindowRead:
        sample_map = None
        if self._function:
            sample_map = SampleMap(self._function, key64("map", self._plan.spec.seed, epoch))
        return window_read(self._manifest, self._columns, window, sample_map, self._cache)


class _ReadAhead:
    """Runs an iterator of blocks in a thread, one block ahead of who takes them."""

    def __init__(self, blocks: Generator[tuple[WindowRead, WindowRows], None, None]):
        self._blocks = blocks
        self._ready: Queue[tuple[WindowRead, WindowRows] | BaseException] = Queue(maxsize=1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="undula-read-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> tuple[WindowRead, WindowRows]:
        block = self._ready.get()
        if isinstance(block, BaseException):
            raise block
        return block

    def close(self) -> None:
        self._closed.set()
        while self._thread.is_alive():
            with suppress(Empty):  # the thread may wait for room
                self._ready.get(timeout=0.05)
        self._blocks.close()

    def _run(self) -> None:
        try:
            for block in self._blocks:
                self._ready.put(block)
                if self._closed.is_set():
                    return
            self._ready.put(AssertionError("more samples were taken than the plan has"))
        except BaseException as error:
            self._ready.put(error)


def _windows(reads: list[WindowRead], spec: DataSpec) -> Generator[tuple[WindowRead, WindowRows], None, None]:
    """The rows of each read, in order: the head of them read here, as the processes of Ray Data's tasks take seconds to start."""
    end_bytes = np.cumsum([read.num_bytes for read in reads])
    head = int(np.searchsorted(end_bytes, spec.head_mib * 2**20, side="right"))
    for read in reads[:head]:
        yield read, WindowRows(read, [read()])
    if reads[head:]:
        tables = _tables(reads[head:], spec)
        rest = pa.table({})
        for read in reads[head:]:
            parts: list[pa.Table] = []
            missing = read.num_rows
            while missing:  # Ray Data joins and cuts tables as it sees fit
                rest = rest if rest.num_rows else next(tables)
                parts.append(rest.slice(0, missing))
                missing -= parts[-1].num_rows
                rest = rest.slice(parts[-1].num_rows)
            yield read, WindowRows(read, parts)


def _tables(reads: list[WindowRead], spec: DataSpec) -> Iterator[pa.Table]:
    """The rows of the reads, in order, by tasks of Ray Data."""
    source = WindowDatasource(reads)
    dataset = ray.data.read_datasource(
        source,
        override_num_blocks=source.num_tasks,
        concurrency=spec.read_tasks,
        num_cpus=spec.read_cpus,
    )
    options = dataset.context.execution_options
    options.preserve_order = True
    options.resource_limits = ray.data.ExecutionResources(object_store_memory=spec.prefetch_mib * 2**20)
    dataset.context.enable_progress_bars = False
    return iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1))
