"""Tests of rows that read tasks deliver late: a window has exactly its rows, and a wait can be ended from another thread."""

import threading
from collections.abc import Generator, Iterator
from queue import Queue

import numpy as np
import pyarrow as pa
import pytest
from data_sets import write_table

from undula.data.stored.manifest import ID_COLUMN
from undula.data.stored.read_ahead import ReadAhead
from undula.data.stored.reads import WindowRead, WindowReads
from undula.data.stored.tasks import Execution, TaskRows
from undula.plan.order import EpochOrder
from undula.plan.plan import Plan, PlanSpec

NUM_ROWS = 90


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> list[WindowRead]:
    """Reads of windows of about 20 rows."""
    manifest = write_table(tmp_path_factory.mktemp("rows"), {"value": np.arange(NUM_ROWS)}, row_group_bytes=10 * 8)
    plan = Plan(PlanSpec(global_batch=10, virtual_workers=1, window=2), NUM_ROWS)
    windows = EpochOrder(plan, manifest.row_counts, 0).windows(0)
    return [WindowReads(manifest, manifest.columns).of(window) for window in windows]


class Late(Execution):
    """Tasks that deliver tables when the test says so."""

    def __init__(self, tables: list[pa.Table]):
        super().__init__((), 0, 0.0)
        self.allowed: Queue[bool] = Queue()
        self.delivered = 0
        self._tables = tables

    def tables(self) -> Generator[pa.Table, None, None]:
        for table in self._tables:
            if not self.allowed.get():
                return
            yield table
            self.delivered += 1

    def allow(self, tables: int) -> None:
        for _ in range(tables):
            self.allowed.put(True)

    def close(self) -> None:
        self.allowed.put(False)


def late(reads: list[WindowRead], task_rows: list[int], parts: int, table_rows: int) -> list[Late]:
    """Deal tasks to parts. Their tables have at most `table_rows` rows."""
    rows = pa.concat_tables([read() for read in reads])
    tables: list[list[pa.Table]] = [[] for _ in range(parts)]
    start = 0
    for number, count in enumerate(task_rows):
        task = rows.slice(start, count)
        tables[number % parts] += [task.slice(place, table_rows) for place in range(0, count, table_rows)]
        start += count
    return [Late(of_part) for of_part in tables]


def ids(tables: list[pa.Table]) -> list[int]:
    return [row for table in tables for row in table[ID_COLUMN].to_pylist()]


def taken(rows: TaskRows, reads: list[WindowRead]) -> Iterator[bool]:
    """Take the windows, and yield after each of them whether it has the right rows."""
    for read in reads:
        yield ids(rows.take(read)) == read.ids().tolist()


@pytest.mark.parametrize("task_rows", [[90], [33, 7, 50], [20, 20, 20, 20, 10]])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("late_after", [0, 1, 2])
def test_rows_are_exact_when_tasks_stop_and_catch_up(
    reads: list[WindowRead], task_rows: list[int], parts: int, late_after: int
) -> None:
    """Each part of the tasks stops after `late_after` tables, and delivers the others after two windows were taken."""
    tasks = late(reads, task_rows, parts, table_rows=17)
    for part in tasks:
        part.allow(late_after)
    rows = TaskRows(task_rows, tasks, patience_s=0.01)
    found = taken(rows, reads)
    assert next(found)
    assert next(found)
    for part in tasks:
        part.allow(NUM_ROWS)
    assert all(found)
    rows.close()


def test_rows_of_tasks_that_never_run_are_exact(reads: list[WindowRead]) -> None:
    tasks = late(reads, [45, 45], 2, table_rows=20)
    rows = TaskRows([45, 45], tasks, patience_s=0.01)
    assert all(taken(rows, reads))
    assert [part.delivered for part in tasks] == [0, 0]
    rows.close()


def test_a_wait_ends_when_another_thread_closes(reads: list[WindowRead]) -> None:
    rows = TaskRows([90], late(reads, [90], 1, table_rows=20), patience_s=3600)
    waiting = ReadAhead((rows.take(read) for read in reads), rows.close)
    closing = threading.Thread(target=waiting.close)
    closing.start()
    closing.join(timeout=60)
    assert not closing.is_alive()
    with pytest.raises(AssertionError, match="closed"):
        next(waiting)
    assert not [thread for thread in threading.enumerate() if thread.name == "undula-read-ahead"]
