"""A read task brings the rows of its window in stream order, from the position asked for."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from undula.data.manifest import Manifest
from undula.data.read import ID_COLUMN, WindowRead, window_read
from undula.data.write import write_shards
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
        yield window_read(manifest, ("value", "name"), window, position)


def stream(epoch: EpochOrder, virtual_worker: int) -> np.ndarray:
    """Ids of a virtual worker's whole epoch, as the plan says; shape [stream length]."""
    return np.concatenate([epoch.ids(step, virtual_worker) for step in range(epoch.plan.steps_per_epoch)])


@pytest.mark.parametrize("shuffle", ["none", "row_groups", "window"])
def test_windows_bring_the_rows_that_the_plan_says(store: Store, shuffle: str) -> None:
    manifest = write(store)
    assert len(manifest.row_counts) > 10
    epoch = order(manifest, shuffle)
    for virtual_worker in range(3):
        tables = [table for read in reads(manifest, epoch, virtual_worker) for table in read()]
        table = pa.concat_tables(tables)
        ids = table[ID_COLUMN].to_numpy()
        assert np.array_equal(ids, stream(epoch, virtual_worker))
        assert table["value"].to_pylist() == (ids + 1000).tolist()
        assert table["name"].to_pylist() == [f"row {row}" for row in ids]


@pytest.mark.parametrize("shuffle", ["none", "window"])
def test_reading_from_a_position_skips_what_was_consumed(store: Store, shuffle: str) -> None:
    manifest = write(store)
    epoch = order(manifest, shuffle)
    whole = stream(epoch, 1)
    for position in (0, 1, 17, 40, len(whole) - 1):
        tasks = list(reads(manifest, epoch, 1, position))
        ids = np.concatenate([table[ID_COLUMN].to_numpy() for task in tasks for table in task()])
        assert np.array_equal(ids, whole[position:])
        assert sum(task.num_rows for task in tasks) == len(ids)
        assert np.array_equal(np.concatenate([task.ids() for task in tasks]), ids)


def test_only_the_named_columns_are_read(tmp_path: Path) -> None:
    manifest = write(open_store(str(tmp_path)))
    (table,) = window_read(manifest, ("value",), next(order(manifest).windows(0)), 0)()
    assert table.column_names == ["value", ID_COLUMN]


def test_bytes_of_a_window_are_about_those_of_its_rows(tmp_path: Path) -> None:
    manifest = write(open_store(str(tmp_path)))
    total = sum(sum(file.row_group_bytes) for file in manifest.files)
    read = sum(read.num_bytes for worker in range(3) for read in reads(manifest, order(manifest), worker))
    assert 0.95 * total < read <= total


def test_broken_shard_is_named(store: Store) -> None:
    manifest = write(store)
    (first, *_) = reads(manifest, order(manifest), 0)
    name = first.pieces[0].file
    store.write(name, store.read(name)[:-10])
    with pytest.raises(ManifestError, match=f"^{store.url}/{name} cannot be read as its manifest says"):
        list(first())


def test_missing_shard_is_named(store: Store) -> None:
    manifest = write(store)
    (first, *_) = reads(manifest, order(manifest), 0)
    name = first.pieces[0].file
    store.delete(name)
    with pytest.raises((ManifestError, StorageError), match=f"{store.url}/{name}"):
        list(first())
