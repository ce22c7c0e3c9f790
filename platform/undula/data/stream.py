"""The stream of a rank: Ray Data reads just the windows that its virtual workers need, in the plan's order, from any step on."""

import threading
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue

import numpy as np
import pyarrow as pa
import ray.data
import torch
from numpy.typing import NDArray
from torch import Tensor

from undula.data.manifest import ID_COLUMN, Column, Manifest
from undula.data.read import WindowDatasource, WindowRead, window_read
from undula.data.spec import DataSpec
from undula.errors import ManifestError
from undula.plan.order import EpochOrder
from undula.plan.plan import Plan

Batch = dict[str, Tensor | list[str]]
"""Columns by name: tensors of shape [samples, *sample shape]; strings as lists."""


@dataclass(frozen=True)
class Samples:
    """Consecutive samples of one virtual worker."""

    ids: NDArray[np.int64]
    batch: Batch


class RankStream:
    """Samples of some virtual workers from a step on, to be taken in the order of steps and virtual workers.

    Args:
        manifest: the data set.
        plan: what each step consumes.
        virtual_workers: those of this rank.
        spec: columns, and how many read tasks run ahead.
        start: step, counted over the whole run, whose samples come first.
    """

    def __init__(self, manifest: Manifest, plan: Plan, virtual_workers: range, spec: DataSpec, start: int = 0):
        self._manifest = manifest
        self._plan = plan
        self._virtual_workers = virtual_workers
        self._spec = spec
        self._columns = manifest.select(spec.columns)
        self._epoch = -1
        self._start = start
        self._blocks: _ReadAhead | None = None
        self._queues: dict[int, deque[pa.Table]] = {}

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
        queue = self._queues[virtual_worker]
        taken, missing = [], count
        while missing:
            while not queue:
                self._fetch()
            table = queue.popleft()
            if table.num_rows > missing:
                queue.appendleft(table.slice(missing))
                table = table.slice(0, missing)
            taken.append(table)
            missing -= table.num_rows
        return _samples(pa.concat_tables(taken), self._columns)

    def any_rows(self) -> Samples:
        """A few rows of the data set, for a rank whose share of a short step is empty but must join its collectives.

        Two where there are two: some layers, BatchNorm among them, cannot train on one.
        """
        order = EpochOrder(self._plan, self._manifest.row_counts, epoch=0)
        window = next(order.windows(self._virtual_workers[0]))
        (table,) = window_read(self._manifest, self._column_names, window, 0)()
        return _samples(table.slice(0, 2), self._columns)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._blocks:
            self._blocks.close()
        self._blocks, self._queues = None, {}

    @property
    def _column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self._columns)

    def _open(self, epoch: int, step_in_epoch: int) -> None:
        self.close()
        self._epoch = epoch
        self._queues = {virtual_worker: deque() for virtual_worker in self._virtual_workers}
        self._blocks = _ReadAhead(_blocks(self._reads(epoch, step_in_epoch), self._spec))

    def _reads(self, epoch: int, step_in_epoch: int) -> list[WindowRead]:
        """The windows that are left of an epoch, in the order in which steps first need them."""
        order = EpochOrder(self._plan, self._manifest.row_counts, epoch)
        share = self._plan.virtual_worker_batch
        position = step_in_epoch * share
        reads = [
            window_read(self._manifest, self._column_names, window, position)
            for virtual_worker in self._virtual_workers
            for window in order.windows(virtual_worker, position)
        ]
        return sorted(reads, key=lambda read: (max(read.window.start, position) // share, read.window.virtual_worker))

    def _fetch(self) -> None:
        assert self._blocks is not None
        read, table = next(self._blocks)
        self._queues[read.window.virtual_worker].append(table)


class _ReadAhead:
    """Runs an iterator of blocks in a thread, one block ahead of who takes them."""

    def __init__(self, blocks: Generator[tuple[WindowRead, pa.Table], None, None]):
        self._blocks = blocks
        self._ready: Queue[tuple[WindowRead, pa.Table] | BaseException] = Queue(maxsize=1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="undula-read-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> tuple[WindowRead, pa.Table]:
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


def _blocks(reads: list[WindowRead], spec: DataSpec) -> Generator[tuple[WindowRead, pa.Table], None, None]:
    """The rows of each read, in order: the head of them read here, as the processes of Ray Data's tasks take seconds to start."""
    end_bytes = np.cumsum([read.num_bytes for read in reads])
    head = int(np.searchsorted(end_bytes, spec.head_mib * 2**20, side="right"))
    for read in reads[:head]:
        for table in read():
            yield read, table
    if reads[head:]:
        yield from _read_in_tasks(reads[head:], spec)


def _read_in_tasks(reads: list[WindowRead], spec: DataSpec) -> Generator[tuple[WindowRead, pa.Table], None, None]:
    """The rows of each read, in order; a read may come in several tables where Ray Data cuts its block."""
    dataset = ray.data.read_datasource(
        WindowDatasource(reads),
        override_num_blocks=len(reads),
        concurrency=spec.read_tasks,
        ray_remote_args={"num_cpus": spec.read_cpus},
    )
    dataset.context.execution_options.preserve_order = True
    dataset.context.enable_progress_bars = False
    tables = iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1))
    for read in reads:
        ids, done = read.ids(), 0
        while done < read.num_rows:
            table = next(tables)
            arrived = table[ID_COLUMN].to_numpy()
            if not np.array_equal(arrived, ids[done : done + len(arrived)]):
                raise ManifestError(
                    f"{read.url} gave other rows than its plan says: index it again with `undula data index`"
                )
            done += len(arrived)
            if len(arrived):
                yield read, table


def _samples(table: pa.Table, columns: tuple[Column, ...]) -> Samples:
    table = table.combine_chunks()
    return Samples(
        ids=table[ID_COLUMN].to_numpy(),
        batch={column.name: _values(table[column.name].combine_chunks(), column) for column in columns},
    )


def _values(array: pa.Array, column: Column) -> Tensor | list[str]:
    nulls = array.null_count
    if column.shape:
        array = array.flatten()
        nulls += array.null_count
    if nulls:
        raise ManifestError(
            f"column {column.name!r} has nulls, which no tensor holds: fill them, or leave it out of data.columns"
        )
    if column.type in ("string", "large_string"):
        return list(array.to_pylist())
    # A copy: Arrow's buffers are read-only, and torch would hand them to code that may write.
    values = array.to_numpy(zero_copy_only=False).copy()
    return torch.from_numpy(values).view(-1, *column.shape)
