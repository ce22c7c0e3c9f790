"""Tests of reading windows: they have the rows of the plan, in stream order, and take the memory that was estimated."""

import itertools
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from data_sets import write_table
from ray import cloudpickle

from undula.data.prepare.write import array_column, array_field
from undula.data.reader import Samples
from undula.data.stored.manifest import Manifest
from undula.data.stored.reads import ID_COLUMN, LOCAL_READS, WindowRead, WindowReads, row_group_reads, tables
from undula.data.stored.rows import WindowRows, concatenated
from undula.data.stored.shards import Shard
from undula.data.stored.tasks import Pacing, RowsDatasource, concurrency, rows_tasks
from undula.errors import ManifestError
from undula.plan.order import EpochOrder
from undula.plan.plan import Plan, PlanSpec
from undula.storage import Store

NUM_ROWS = 230
TABLE = pa.table(
    {"value": pa.array(range(1000, 1000 + NUM_ROWS), pa.int64()), "name": [f"row {row}" for row in range(NUM_ROWS)]}
)


def write(store: Store) -> Manifest:
    return write_table(store, TABLE, num_shards=3, row_group_bytes=400)


def order(manifest: Manifest, shuffle: str = "window") -> EpochOrder:
    spec = PlanSpec(global_batch=15, virtual_workers=3, window=2, shuffle=shuffle)
    return EpochOrder(Plan(spec, manifest.num_rows), manifest.row_counts, epoch=1)


def reads(manifest: Manifest, epoch: EpochOrder, virtual_worker: int = 0) -> Iterator[WindowRead]:
    return map(WindowReads(manifest, manifest.columns).of, epoch.windows(virtual_worker))


def reads_of_plan(manifest: Manifest, virtual_worker: int = 0, **spec: int) -> list[WindowRead]:
    return list(
        reads(manifest, EpochOrder(Plan(PlanSpec(**spec), manifest.num_rows), manifest.row_counts, 0), virtual_worker)
    )


def samples(read: WindowRead) -> Samples:
    """Return all rows of a window, in stream order."""
    return WindowRows(read, [read()]).take(0, read.num_rows)


@pytest.mark.parametrize("shuffle", ["none", "row_groups", "window"])
def test_windows_have_the_rows_of_the_plan(store: Store, shuffle: str) -> None:
    manifest = write(store)
    assert len(manifest.row_counts) > 10
    epoch = order(manifest, shuffle)
    for virtual_worker in range(3):
        taken = concatenated([samples(read) for read in reads(manifest, epoch, virtual_worker)])
        planned = [epoch.ids(step, virtual_worker) for step in range(epoch.plan.steps_per_epoch)]
        assert np.array_equal(taken.ids, np.concatenate(planned))
        assert taken.batch["value"].tolist() == (taken.ids + 1000).tolist()
        assert taken.batch["name"] == [f"row {row}" for row in taken.ids]


@pytest.mark.parametrize("cuts", [(0, 5), (0, 1, 2, 5), (0, 3, 5)])
def test_rows_do_not_depend_on_the_tables_they_were_read_in(folder: Store, cuts: tuple[int, ...]) -> None:
    manifest = write(folder)
    read = next(reads(manifest, order(manifest)))
    table = read()
    bounds = [cut * read.num_rows // 5 for cut in cuts]
    parts = [table.slice(start, stop - start) for start, stop in itertools.pairwise(bounds)]
    taken, whole = WindowRows(read, parts).take(1, 4), samples(read)
    assert taken.ids.tolist() == whole.ids[1:4].tolist()
    assert taken.batch["value"].tolist() == whole.batch["value"][1:4].tolist()
    assert taken.batch["name"] == whole.batch["name"][1:4]


def test_rows_that_differ_from_the_plan_are_refused(folder: Store) -> None:
    manifest = write(folder)
    one, other = itertools.islice(reads(manifest, order(manifest)), 2)
    with pytest.raises(ManifestError, match=f"rows of {manifest.url} differ from its manifest"):
        WindowRows(one, [other()])


def test_a_task_reads_several_windows_in_order(folder: Store) -> None:
    manifest = write(folder)
    windows = [read for v in range(3) for read in reads(manifest, order(manifest), v)]
    tasks = rows_tasks(windows, task_bytes=3 * windows[0].num_bytes)
    assert 1 < len(tasks) < len(windows)
    ids = [table[ID_COLUMN].to_numpy() for task in tasks for table in task()]
    assert np.array_equal(np.concatenate(ids), np.concatenate([read.ids() for read in windows]))


def test_rows_of_one_window_alone_do_not_keep_their_row_group_in_memory(folder: Store) -> None:
    manifest = write_table(folder, {"value": range(640)})
    (window,) = reads_of_plan(manifest, virtual_worker=3, global_batch=64, virtual_workers=64)
    assert sum(buffer.size for chunk in window()["value"].chunks for buffer in chunk.buffers() if buffer) < 200


@pytest.mark.parametrize(("ahead", "started"), [(0, 1), (1, 1), (2, 2), (9, LOCAL_READS)])
def test_only_row_groups_that_fit_are_read_ahead(
    folder: Store, monkeypatch: pytest.MonkeyPatch, ahead: int, started: int
) -> None:
    manifest = write_table(folder, {"value": range(1000)}, row_group_bytes=100 * 8)
    (window,) = reads_of_plan(manifest, global_batch=10, virtual_workers=1, window=10)
    groups = list(row_group_reads([window]))
    decoded, row_group = [], Shard.row_group
    monkeypatch.setattr(Shard, "row_group", lambda *arguments: decoded.append(arguments) or row_group(*arguments))
    rows = tables(groups, ahead_bytes=ahead * groups[0].peak_bytes)
    next(rows)
    rows.close()
    assert 800 <= groups[0].peak_bytes < 1200
    assert len(decoded) <= started


def test_fewer_tasks_run_at_once_if_their_rows_would_not_fit(folder: Store) -> None:
    """Masks that take little space in their file take all of it in memory."""
    masks = np.zeros((64, 1000), np.uint8)
    field = array_field("mask", pa.uint8(), (1000,))
    table = pa.table([array_column(field, masks)], pa.schema([field]))
    manifest = write_table(folder, table, num_shards=4, row_group_bytes=2**20)
    assert sum(sum(file.row_group_bytes) for file in manifest.files) < masks.nbytes / 20
    tasks = rows_tasks(reads_of_plan(manifest, global_batch=4, virtual_workers=1), task_bytes=16_000)
    assert len(tasks) == 4
    assert [concurrency(tasks, num_bytes) for num_bytes in (1_000, 16_000, 48_000, 10**9)] == [1, 1, 3, 4]
    assert RowsDatasource(tasks).estimate_inmemory_data_size() == masks.nbytes


def test_a_windows_size_is_about_that_of_its_rows(folder: Store) -> None:
    manifest = write(folder)
    for worker in range(3):
        for read in reads(manifest, order(manifest), worker):
            rows = read().drop_columns(ID_COLUMN)
            assert rows.nbytes <= read.num_bytes < 2 * rows.nbytes  # a small row group has more headers than rows


def test_a_changed_shard_is_refused_by_name_even_when_its_size_is_the_same(store: Store) -> None:
    manifest = write(store)
    (first, *_) = reads(manifest, order(manifest))
    name = first.ranges[0].shard.name
    data = bytearray(store.read(name))
    data[100] ^= 1
    store.write(name, bytes(data))
    with pytest.raises(ManifestError, match=f"^{store.url}/{name} has changed since it was indexed"):
        first()


def test_processes_of_read_tasks_do_not_import_torch(folder: Store) -> None:
    """It would take each of them seconds and 200 MiB."""
    manifest = write(folder)
    tasks = RowsDatasource(rows_tasks(reads(manifest, order(manifest)), task_bytes=500)).get_read_tasks(1)
    script = """
import pickle, sys
tasks, _ = pickle.load(sys.stdin.buffer)
assert sum(table.num_rows for task in tasks for table in task()) > 0
assert "torch" not in sys.modules
"""
    sent = cloudpickle.dumps((tasks, Pacing))
    done = subprocess.run([sys.executable, "-c", script], input=sent, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
