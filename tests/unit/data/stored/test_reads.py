"""Tests of reading windows: they have the rows of the plan, in stream order."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from ray import cloudpickle

from undula.data.prepare.write import array_column, array_field, write_shards
from undula.data.reader import Samples
from undula.data.stored.manifest import Column, Manifest
from undula.data.stored.maps import Sample, SampleMap
from undula.data.stored.reads import ID_COLUMN, LOCAL_READS, WindowRead, WindowReads, row_group_reads, tables
from undula.data.stored.rows import WindowRows, concatenated
from undula.data.stored.shards import Shard
from undula.data.stored.tasks import Pacing, RowsDatasource, concurrency, rows_tasks
from undula.errors import ManifestError, StorageError
from undula.plan.order import EpochOrder
from undula.plan.plan import Plan, PlanSpec
from undula.storage import Store, open_store

NUM_ROWS = 230
TABLE = pa.table(
    {"value": pa.array(range(1000, 1000 + NUM_ROWS), pa.int64()), "name": [f"row {row}" for row in range(NUM_ROWS)]}
)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(request.getfixturevalue("s3").url("data") if request.param == "s3" else str(tmp_path / "data"))


def write(store: Store) -> Manifest:
    return write_shards(store, [TABLE], TABLE.schema, NUM_ROWS, num_shards=3, row_group_bytes=400)


def order(manifest: Manifest, shuffle: str = "window") -> EpochOrder:
    spec = PlanSpec(global_batch=15, virtual_workers=3, window=2, shuffle=shuffle)
    return EpochOrder(Plan(spec, manifest.num_rows), manifest.row_counts, epoch=1)


def reads(manifest: Manifest, epoch: EpochOrder, virtual_worker: int, position: int = 0) -> Iterator[WindowRead]:
    for window in epoch.windows(virtual_worker, position):
        yield WindowReads(manifest, manifest.select(("value", "name"))).of(window)


def samples(manifest: Manifest, read: WindowRead) -> Samples:
    """Return all rows of a window, in stream order."""
    return WindowRows(read, [read()]).take(0, read.num_rows)


def stream(epoch: EpochOrder, virtual_worker: int) -> np.ndarray:
    """Return the planned ids of a virtual worker's whole epoch; shape [stream length]."""
    return np.concatenate([epoch.ids(step, virtual_worker) for step in range(epoch.plan.steps_per_epoch)])


@pytest.mark.parametrize("shuffle", ["none", "row_groups", "window"])
def test_windows_have_the_rows_of_the_plan(store: Store, shuffle: str) -> None:
    manifest = write(store)
    assert len(manifest.row_counts) > 10
    epoch = order(manifest, shuffle)
    for virtual_worker in range(3):
        taken = concatenated([samples(manifest, read) for read in reads(manifest, epoch, virtual_worker)])
        assert np.array_equal(taken.ids, stream(epoch, virtual_worker))
        assert taken.batch["value"].tolist() == (taken.ids + 1000).tolist()
        assert taken.batch["name"] == [f"row {row}" for row in taken.ids]


@pytest.mark.parametrize("cuts", [(0, 5), (0, 1, 2, 5), (0, 3, 5)])
def test_rows_do_not_depend_on_the_tables_they_were_read_in(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    manifest = write(open_store(str(tmp_path)))
    read = next(reads(manifest, order(manifest), 0))
    table = read()
    bounds = [cut * read.num_rows // 5 for cut in cuts]
    parts = [table.slice(start, stop - start) for start, stop in pairwise(bounds)]
    taken, whole = WindowRows(read, parts).take(1, 4), samples(manifest, read)
    assert taken.ids.tolist() == whole.ids[1:4].tolist()
    assert taken.batch["value"].tolist() == whole.batch["value"][1:4].tolist()
    assert taken.batch["name"] == whole.batch["name"][1:4]


def test_rows_that_differ_from_the_plan_are_refused(tmp_path: Path) -> None:
    manifest = write(open_store(str(tmp_path)))
    one, other = itertools.islice(reads(manifest, order(manifest), 0), 2)
    with pytest.raises(ManifestError, match=f"rows of {manifest.url} differ from its manifest"):
        WindowRows(one, [other()])


@pytest.mark.parametrize("shuffle", ["none", "window"])
def test_reading_from_a_position_skips_the_windows_before_it(store: Store, shuffle: str) -> None:
    manifest = write(store)
    epoch = order(manifest, shuffle)
    whole = stream(epoch, 1)
    for position in (0, 1, 17, 40, len(whole) - 1):
        left = list(reads(manifest, epoch, 1, position))
        assert left[0].window.start <= position < left[0].window.start + left[0].num_rows
        ids = np.concatenate([samples(manifest, read).ids for read in left])
        assert np.array_equal(ids, whole[left[0].window.start :])


COLUMNS = {
    "ints": pa.array([1, 2, 3, 4], pa.int16()),
    "floats": pa.array([0.5, 1.5, 2.5, 3.5], pa.float32()),
    "flags": pa.array([True, False, True, True]),
    "texts": pa.array(["a", "", "c", "d"]),
    "images": array_column(array_field("images", pa.uint8(), (2, 3)), np.arange(24, dtype=np.uint8).reshape(4, 2, 3)),
}


@pytest.mark.parametrize("shuffle", ["none", "window"])
def test_columns_of_all_kinds_become_tensors_and_strings(tmp_path: Path, shuffle: str) -> None:
    fields = [array_field(n, pa.uint8(), (2, 3)) if n == "images" else pa.field(n, c.type) for n, c in COLUMNS.items()]
    schema = pa.schema(fields)
    table = pa.Table.from_arrays(list(COLUMNS.values()), schema=schema)
    manifest = write_shards(open_store(str(tmp_path)), [table], schema, 4, num_shards=1)
    plan = Plan(PlanSpec(global_batch=4, virtual_workers=1, shuffle=shuffle), 4)
    window = next(EpochOrder(plan, manifest.row_counts, 0).windows(0))
    read = WindowReads(manifest, manifest.columns).of(window)
    taken = WindowRows(read, [read()]).take(1, 4)
    assert taken.batch["ints"].dtype == torch.int16
    assert taken.batch["floats"].dtype == torch.float32
    assert taken.batch["flags"].dtype == torch.bool
    for name in ("ints", "floats", "flags"):
        assert taken.batch[name].tolist() == [COLUMNS[name][row].as_py() for row in taken.ids]
    assert taken.batch["texts"] == [COLUMNS["texts"][row].as_py() for row in taken.ids]
    images = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    assert np.array_equal(taken.batch["images"].numpy(), images[taken.ids])


NULLS = {
    "integer": pa.array([1, None], pa.int64()),
    "real number": pa.array([1.0, None], pa.float32()),
    "boolean": pa.array([True, None]),
    "string": pa.array(["a", None]),
    "bytes": pa.array([b"a", None]),
    "element of a list": pa.array([[1, None], [3, 4]], pa.list_(pa.int64(), 2)),
    "list": pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
}


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("kind", NULLS)
def test_nulls_are_refused_with_and_without_a_map(tmp_path: Path, kind: str, is_mapped: bool) -> None:
    table = pa.table({"pairs": NULLS[kind]})
    manifest = write_shards(open_store(str(tmp_path)), [table], table.schema, 2, num_shards=1)
    plan = Plan(PlanSpec(global_batch=2, virtual_workers=1), 2)
    mapped = []

    def remember(sample: Sample, rng: np.random.Generator) -> Sample:
        mapped.append(sample)
        return {"other": 1}

    sample_map = SampleMap(remember, 1, manifest.url, (Column("other", "int64", ()),)) if is_mapped else None
    window = next(EpochOrder(plan, manifest.row_counts, 0).windows(0))
    read = WindowReads(manifest, manifest.columns).of(window, sample_map=sample_map)
    with pytest.raises(ManifestError, match="'pairs' has nulls"):
        WindowRows(read, [read()])
    assert not mapped


def test_a_task_reads_several_windows_in_order(tmp_path: Path) -> None:
    manifest = write(open_store(str(tmp_path)))
    windows = [read for v in range(3) for read in reads(manifest, order(manifest), v)]
    tasks = rows_tasks(windows, task_bytes=3 * windows[0].num_bytes)
    assert 1 < len(tasks) < len(windows)
    ids = [table[ID_COLUMN].to_numpy() for task in tasks for table in task()]
    assert np.array_equal(np.concatenate(ids), np.concatenate([read.ids() for read in windows]))


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """List of the row groups that were decoded, as (shard, row group)."""
    found: list[tuple[str, int]] = []
    row_group = Shard.row_group

    def counting(shard: Shard, number: int, columns: Sequence[str]) -> pa.Table:
        found.append((shard.name, number))
        return row_group(shard, number, columns)

    monkeypatch.setattr(Shard, "row_group", counting)
    return found


@pytest.mark.parametrize("shuffle", ["none", "row_groups", "window"])
def test_virtual_workers_that_share_row_groups_decode_each_of_them_once(
    tmp_path: Path, decodes: list[tuple[str, int]], shuffle: str
) -> None:
    table = pa.table({"value": range(640)})
    manifest = write_shards(open_store(str(tmp_path)), [table], table.schema, 640, 1, row_group_bytes=130 * 8)
    epoch = EpochOrder(
        Plan(PlanSpec(global_batch=64, virtual_workers=64, shuffle=shuffle), 640), manifest.row_counts, epoch=0
    )
    windows = [WindowReads(manifest, manifest.columns).of(window) for v in range(64) for window in epoch.windows(v)]
    rows = list(tables(row_group_reads(windows), ahead_bytes=2**20))
    assert len(windows) >= 64
    assert len(decodes) == len(set(decodes)) == len(manifest.row_counts) == 5
    assert np.concatenate([part[ID_COLUMN] for part in rows]).tolist() == [int(i) for w in windows for i in w.ids()]
    assert sum(read.num_bytes for read in windows) == pytest.approx(sum(manifest.files[0].row_group_bytes), rel=0.05)


def test_rows_of_one_window_alone_do_not_keep_their_row_group_in_memory(tmp_path: Path) -> None:
    table = pa.table({"value": range(640)})
    manifest = write_shards(open_store(str(tmp_path)), [table], table.schema, 640, 1)
    epoch = EpochOrder(Plan(PlanSpec(global_batch=64, virtual_workers=64), 640), manifest.row_counts, epoch=0)
    (window,) = (WindowReads(manifest, manifest.columns).of(window) for window in epoch.windows(3))
    assert sum(buffer.size for chunk in window()["value"].chunks for buffer in chunk.buffers() if buffer) < 200


@pytest.mark.parametrize(("ahead", "started"), [(0, 1), (1, 1), (2, 2), (9, LOCAL_READS)])
def test_only_row_groups_that_fit_are_read_ahead(
    tmp_path: Path, decodes: list[tuple[str, int]], ahead: int, started: int
) -> None:
    table = pa.table({"value": range(1000)})
    manifest = write_shards(open_store(str(tmp_path)), [table], table.schema, 1000, 1, row_group_bytes=100 * 8)
    epoch = EpochOrder(
        Plan(PlanSpec(global_batch=10, virtual_workers=1, window=10), 1000), manifest.row_counts, epoch=0
    )
    groups = list(row_group_reads([WindowReads(manifest, manifest.columns).of(next(epoch.windows(0)))]))
    rows = tables(groups, ahead_bytes=ahead * groups[0].peak_bytes)
    next(rows)
    rows.close()
    assert 800 <= groups[0].peak_bytes < 1200
    assert len(decodes) <= started


def test_fewer_tasks_run_at_once_if_their_rows_would_not_fit(tmp_path: Path) -> None:
    """Masks that take little space in their file take all of it in memory."""
    masks = np.zeros((64, 1000), np.uint8)
    field = array_field("mask", pa.uint8(), (1000,))
    table = pa.table([array_column(field, masks)], pa.schema([field]))
    manifest = write_shards(open_store(str(tmp_path)), [table], table.schema, 64, 4, row_group_bytes=2**20)
    assert sum(sum(file.row_group_bytes) for file in manifest.files) < masks.nbytes / 20
    epoch = EpochOrder(Plan(PlanSpec(global_batch=4, virtual_workers=1), 64), manifest.row_counts, epoch=0)
    windows = [WindowReads(manifest, manifest.columns).of(window) for window in epoch.windows(0)]
    tasks = rows_tasks(windows, task_bytes=16_000)
    assert len(tasks) == 4
    assert [concurrency(tasks, num_bytes) for num_bytes in (1_000, 16_000, 48_000, 10**9)] == [1, 1, 3, 4]
    assert RowsDatasource(tasks).estimate_inmemory_data_size() == masks.nbytes


def test_only_the_named_columns_are_read(tmp_path: Path) -> None:
    manifest = write(open_store(str(tmp_path)))
    table = WindowReads(manifest, manifest.select(("value",))).of(next(order(manifest).windows(0)))()
    assert table.column_names == ["value", ID_COLUMN]


def test_a_windows_size_is_about_that_of_its_rows(tmp_path: Path) -> None:
    manifest = write(open_store(str(tmp_path)))
    for worker in range(3):
        for read in reads(manifest, order(manifest), worker):
            rows = read().drop_columns(ID_COLUMN)
            assert rows.nbytes <= read.num_bytes < 2 * rows.nbytes  # a small row group has more headers than rows


def test_changed_shard_is_refused_by_name(store: Store) -> None:
    manifest = write(store)
    (first, *_) = reads(manifest, order(manifest), 0)
    name = first.ranges[0].shard.name
    store.write(name, store.read(name))  # on a disk, the same bytes are a new version
    if store.is_s3:
        store.write(name, store.read(name)[:-10])
    with pytest.raises(ManifestError, match=f"^{store.url}/{name} has changed since it was indexed"):
        first()


def test_broken_shard_is_named(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    manifest = write(store)
    first = WindowReads(manifest, manifest.select(("value",))).of(next(order(manifest).windows(0)))
    path = tmp_path / first.ranges[0].shard.name
    stat = path.stat()
    path.write_bytes(b"?" * stat.st_size)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ManifestError, match=f"^{path} is not an intact Parquet file"):
        first()


def test_missing_shard_is_named(store: Store) -> None:
    manifest = write(store)
    (first, *_) = reads(manifest, order(manifest), 0)
    name = first.ranges[0].shard.name
    store.delete(name)
    with pytest.raises((ManifestError, StorageError), match=f"{store.url}/{name}"):
        first()


def test_processes_of_read_tasks_do_not_import_torch(tmp_path: Path) -> None:
    """It would take each of them seconds and 200 MiB."""
    manifest = write(Store(str(tmp_path)))
    tasks = RowsDatasource(rows_tasks(reads(manifest, order(manifest), 0), task_bytes=500)).get_read_tasks(1)
    script = """
import pickle, sys
tasks, _ = pickle.load(sys.stdin.buffer)
assert sum(table.num_rows for task in tasks for table in task()) > 0
assert "torch" not in sys.modules
"""
    sent = cloudpickle.dumps((tasks, Pacing))
    done = subprocess.run([sys.executable, "-c", script], input=sent, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
