"""Read tasks of Ray Data, and the executions that run them. An execution can be closed from any thread and leaves nothing behind.

The processes of the tasks import this module, and must not need torch for it.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Empty
from traceback import format_exception
from typing import Protocol

import pyarrow as pa
import ray
import ray.data
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.exceptions import RayTaskError

from undula.data.spec import DataSpec
from undula.data.stored.read_ahead import ReadAhead
from undula.data.stored.reads import RowGroupRead, WindowRead, row_group_reads, tables
from undula.masking.exceptions import mask_error
from undula.masking.values import mask
from undula.storage import Reporter, waits_reported_to, waits_reporter

NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives each node."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
"""Shortest and longest pause in seconds between two steps of Ray Data's scheduling loop that had nothing to wait for."""
PATIENCE_S = 5.0
"""Time in seconds for which a rank waits for a read task before it reads the rows itself."""
WAITING_STEP_S = 0.02
"""Minimum duration in seconds of a step of Ray Data's scheduling loop that waited for tasks."""


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


@dataclass(frozen=True)
class RowsTask:
    """Function of a read task, which returns the rows of consecutive reads."""

    reads: tuple[RowGroupRead, ...]
    most_bytes: int
    """Maximum memory in bytes that row groups which are read at the same time take."""
    reporter: Reporter | None
    """Callback of the process that wants the rows, to which outages of the store and lost caches are reported."""

    @property
    def num_rows(self) -> int:
        return sum(read.rows.num_rows for read in self.reads)

    @property
    def num_bytes(self) -> int:
        """Estimated size of the rows in bytes."""
        return sum(read.num_bytes for read in self.reads)

    @property
    def peak_bytes(self) -> int:
        """Estimated memory in bytes that the task takes, because Ray Data holds all of its rows."""
        return sum(read.peak_bytes for read in self.reads)

    def __call__(self) -> Iterable[pa.Table]:
        try:
            with waits_reported_to(self.reporter):
                yield from tables(self.reads, self.most_bytes)
        except Exception as error:
            mask_error(error)
            raise ReadTaskError(mask("".join(format_exception(error))), error) from error


def rows_tasks(reads: Iterable[WindowRead], task_bytes: int) -> list[RowsTask]:
    """Return tasks that together read the rows of windows, in order. A table that a task returns can end within a window.

    Args:
        reads: Reads of the windows.
        task_bytes: Maximum memory in bytes that one task takes, unless a single row group takes more. A task has an overhead of about
            20 ms.
    """
    groups: list[list[RowGroupRead]] = []
    num_bytes = 0
    for read in row_group_reads(reads):
        if not groups or num_bytes + read.peak_bytes > task_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(read)
        num_bytes += read.peak_bytes
    reporter = waits_reporter()
    return [RowsTask(tuple(group), task_bytes, reporter) for group in groups]


def concurrency(tasks: Sequence[RowsTask], num_bytes: int) -> int:
    """Return how many tasks can run at the same time within an amount of memory in bytes, but at least one."""
    return max(min(num_bytes // max(task.peak_bytes for task in tasks), len(tasks)), 1)


class RowsDatasource(Datasource):
    """Ray Data source of the rows of tasks."""

    def __init__(self, tasks: Sequence[RowsTask]):
        self._tasks = tasks

    def get_name(self) -> str:
        return "Windows"

    def estimate_inmemory_data_size(self) -> int:
        return sum(task.num_bytes for task in self._tasks)

    def get_read_tasks(self, parallelism: int, *args: object, **kwargs: object) -> list[ReadTask]:
        return [
            ReadTask(task, BlockMetadata(task.num_rows, task.num_bytes, input_files=None, exec_stats=None))
            for task in self._tasks
        ]


class Executor(Protocol):
    """Part of Ray Data's executor that its callbacks may use."""

    def shutdown(self, force: bool) -> None: ...


def executions(reads: Iterable[WindowRead], spec: DataSpec) -> tuple[list[int], list["Execution"]]:
    """Return the number of rows of each read task, and the executions that run the tasks in turn.

    An execution runs one task at a time. Ray Data's scheduling loop waits up to 0.1 s for all running tasks of an execution together
    before it takes the rows of one of them or starts the next one (Ray 2.60, process_completed_tasks).

    Args:
        reads: Reads of the windows, in order.
        spec: Limits of reading ahead.
    """
    prefetch_bytes = spec.prefetch_mib * 2**20
    # Together, the running tasks take at most half of the prefetch limit, or one of them runs alone.
    running_bytes = prefetch_bytes // 2
    tasks = rows_tasks(reads, running_bytes // spec.read_tasks)
    count = min(spec.read_tasks, concurrency(tasks, running_bytes))
    parts = [Execution(tasks[number::count], prefetch_bytes // count, spec.read_cpus) for number in range(count)]
    return [task.num_rows for task in tasks], parts


class Execution:
    """Execution of Ray Data that runs read tasks one after another.

    Args:
        tasks: The tasks.
        prefetch_bytes: Maximum number of bytes to read ahead.
        cpus: Number of CPUs that Ray reserves for a task.
    """

    def __init__(self, tasks: Sequence[RowsTask], prefetch_bytes: int, cpus: float):
        self._tasks = tasks
        self._prefetch_bytes = prefetch_bytes
        self._cpus = cpus
        self._executors: list[Executor] = []

    def tables(self) -> Generator[pa.Table, None, None]:
        """Yield the rows of the tasks in order. A table has rows of one task."""
        try:
            with _collected(self):
                yield from self._blocks()
        except RayTaskError as error:
            if isinstance(error.cause, ReadTaskError):
                raise error.cause.original from error.cause
            raise
        finally:
            self.close()
            self._executors.clear()  # they hold references to rows

    def started(self, executor: Executor) -> None:
        """Note the executor that runs the tasks, to end it at `close`."""
        self._executors.append(executor)

    def close(self) -> None:
        """Cancel the tasks, so that `tables` ends, also if it is waiting for a task in another thread.

        Tasks that start meanwhile are only cancelled by a later call. The processes of the tasks are kept, because the next
        execution would wait seconds for new ones.
        """
        for executor in tuple(self._executors):
            executor.shutdown(force=False)

    def _blocks(self) -> Iterator[pa.Table]:
        # Rows on another node can be lost with it, and reading them again takes seconds. Tasks that reserve CPUs go where CPUs are free.
        here = {NODE_LABEL: ray.get_runtime_context().get_node_id()} if self._cpus == 0 else None
        dataset = ray.data.read_datasource(
            RowsDatasource(self._tasks),
            override_num_blocks=len(self._tasks),
            concurrency=1,
            num_cpus=self._cpus,
            memory=0,  # otherwise, Ray Data can reserve memory that no node has left
            label_selector=here,
            fallback_strategy=[{"label_selector": {}}] if here else None,
        )
        context = dataset.context
        context.execution_options.preserve_order = True
        context.execution_options.resource_limits = ray.data.ExecutionResources(
            object_store_memory=self._prefetch_bytes
        )
        context.enable_progress_bars = False
        context.issue_detectors_config.detectors = []  # they would log advice on Ray Data's own settings
        context.custom_execution_callback_classes = [Pacing]
        # Dataset.iter_batches has a thread that keeps references to rows if it is closed early (Ray 2.60, WaitBlockPrefetcher).
        for bundle in dataset.iter_internal_ref_bundles():
            for block in bundle.block_refs:
                yield ray.get(block)


class TaskRows:
    """Rows of windows that read tasks deliver, taken in order.

    The tasks can wait for as long as the cluster is too full to run them, or until Ray has made up for a lost node. If they have delivered
    nothing for `patience_s` seconds, this process reads windows itself until the tasks, which go on with the same windows, have caught up.

    Args:
        task_rows: Number of rows of each task.
        parts: Executions that run at the same time. The tasks are dealt to them one by one.
        patience_s: Time in seconds, by default PATIENCE_S.
    """

    def __init__(self, task_rows: Sequence[int], parts: Sequence[Execution], patience_s: float | None = None):
        self._parts = [ReadAhead(part.tables(), part.close) for part in parts]
        self._turns = deque((number % len(parts), rows) for number, rows in enumerate(task_rows))
        """Part and number of rows of each task that has not delivered all rows yet."""
        self._rest = pa.table({})
        self._lead = 0
        """Number of rows that this process has taken and the tasks have not delivered yet."""
        self._patience_s = patience_s or PATIENCE_S

    def take(self, read: WindowRead) -> list[pa.Table]:
        """Return the next window's rows as tables."""
        parts: list[pa.Table] = []
        missing = read.num_rows
        while missing:
            try:
                self._await_rows()
            except Empty:
                self._lead += missing
                return [read()]
            parts.append(self._rest.slice(0, missing))
            missing -= parts[-1].num_rows
            self._rest = self._rest.slice(parts[-1].num_rows)
        return parts

    def close(self) -> None:
        """Cancel the tasks."""
        for part in self._parts:
            part.close()

    def _await_rows(self) -> None:
        """Wait for the next row, and drop rows that this process has read itself.

        Raises:
            Empty: The tasks have not delivered it in time, or have not caught up.
        """
        while not self._rest.num_rows or self._lead:
            if not self._rest.num_rows:
                self._rest = self._next_table(0.001 if self._lead else self._patience_s)
            dropped = min(self._lead, self._rest.num_rows)
            self._rest = self._rest.slice(dropped)
            self._lead -= dropped
            if dropped and not self._lead:
                self._patience_s *= 2  # the tasks were only slow, and reading twice would slow them further

    def _next_table(self, limit_s: float) -> pa.Table:
        number, missing = self._turns[0]
        table = self._parts[number].next_within(limit_s)
        self._turns[0] = (number, missing - table.num_rows)
        if table.num_rows == missing:
            self._turns.popleft()
        return table


_current: ContextVar[Execution] = ContextVar("undula-execution")


@contextmanager
def _collected(execution: Execution) -> Iterator[None]:
    """Let the callbacks of Ray Data's executors that start in this thread know their execution."""
    token = _current.set(execution)
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator can be closed by another thread
            _current.reset(token)


class Pacing:
    """Callback that lets Ray Data's scheduling loop pause when it has nothing to do.

    The loop only blocks while tasks run. When all rows are read and wait for training to take them, no task runs, and the loop would
    take a whole core of the training process (Ray 2.60, StreamingExecutor.run). A pause while tasks run would delay their rows and
    the next tasks, so the pauses become longer only as long as steps have nothing to wait for.

    The methods are those of Ray Data's `ExecutionCallback`; this class does not derive from it because it is private. Ray Data
    sends the class to the read tasks, which import this module.
    """

    def __init__(self) -> None:
        self._pause_s = SHORTEST_PAUSE_S
        self._began = time.monotonic()

    def before_execution_starts(self, executor: Executor) -> None:
        """Tell the execution of this thread its executor."""
        _current.get().started(executor)

    def on_execution_step(self, executor: object) -> None:
        """Pause after a step."""
        has_waited = time.monotonic() - self._began >= WAITING_STEP_S
        self._pause_s = SHORTEST_PAUSE_S if has_waited else min(2 * self._pause_s, LONGEST_PAUSE_S)
        time.sleep(self._pause_s)
        self._began = time.monotonic()

    def after_execution_succeeds(self, executor: object) -> None: ...

    def after_execution_fails(self, executor: object, error: Exception) -> None: ...
