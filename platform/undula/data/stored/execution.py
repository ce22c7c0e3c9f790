"""Execution of Ray Data that reads windows in order, and its pace. It can be closed from any thread and leaves nothing behind."""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Protocol

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayTaskError

from undula.data.spec import DataSpec
from undula.data.stored.read import ReadTaskError, WindowDatasource, WindowRead

NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives each node."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
"""Shortest and longest pause in seconds between two steps of Ray Data's scheduling loop that had nothing to wait for."""
WAITING_STEP_S = 0.02
"""Minimum duration in seconds of a step of Ray Data's scheduling loop that waited for tasks."""


class Executor(Protocol):
    """Part of Ray Data's executor that its callbacks may use."""

    def shutdown(self, force: bool) -> None: ...


def executions(reads: list[WindowRead], spec: DataSpec) -> tuple[list[int], list["Execution"]]:
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
    source = WindowDatasource(reads, running_bytes // spec.read_tasks)
    count = min(spec.read_tasks, source.concurrency(running_bytes))
    parts = [Execution(part, prefetch_bytes // count, spec.read_cpus) for part in source.dealt(count)]
    return source.task_rows, parts


class Execution:
    """Execution of Ray Data that runs read tasks one after another.

    Args:
        source: The tasks.
        prefetch_bytes: Maximum number of bytes to read ahead.
        cpus: Number of CPUs that Ray reserves for a task.
    """

    def __init__(self, source: WindowDatasource, prefetch_bytes: int, cpus: float):
        self._source = source
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
            self._source,
            override_num_blocks=self._source.num_tasks,
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
