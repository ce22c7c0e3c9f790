"""Tests of writing a data set: it is complete or does not exist, has even shards, and needs little memory."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from undula.data.prepare.write import array_column, array_field, write_shards
from undula.data.stored.manifest import MANIFEST_NAME, load_manifest
from undula.errors import ManifestError, StorageError, UndulaError
from undula.storage import Store, open_store

SCHEMA = pa.schema([pa.field("value", pa.int64(), nullable=False)])
ROW_BYTES = 8


def batches(num_rows: int, size: int = 10) -> Iterator[pa.RecordBatch]:
    """Yield the rows 0, 1, 2, ... in batches."""
    for start in range(0, num_rows, size):
        yield pa.record_batch([pa.array(range(start, min(start + size, num_rows)), pa.int64())], schema=SCHEMA)


def values(store: Store) -> list[int]:
    """Return the rows of all shards in the manifest, in its order."""
    tables = [pq.read_table(store.open(file.name)) for file in load_manifest(store.url).files]
    return [row for table in tables for row in table["value"].to_pylist()]


def test_shards_are_even_and_keep_the_order_of_the_rows(store: Store) -> None:
    manifest = write_shards(store, batches(103), SCHEMA, 103, num_shards=4, row_group_bytes=10 * ROW_BYTES)
    assert values(store) == list(range(103))
    assert [file.name for file in manifest.files] == [f"part-0000{shard}.parquet" for shard in range(4)]
    assert [sum(file.row_groups) for file in manifest.files] == [25, 26, 26, 26]
    assert [file.row_groups for file in manifest.files][:2] == [(10, 10, 5), (10, 10, 6)]
    assert load_manifest(store.url) == manifest
    manifest.check_files()


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_shards_do_not_depend_on_the_batch_size_of_the_source(folder: Store, size: int) -> None:
    reference = write_shards(folder / "reference", batches(500), SCHEMA, 500, 3, row_group_bytes=24 * ROW_BYTES)
    manifest = write_shards(folder / "other", batches(500, size), SCHEMA, 500, 3, row_group_bytes=24 * ROW_BYTES)
    assert manifest.digest == reference.digest


def test_row_groups_of_rows_of_any_width_have_the_requested_size(folder: Store) -> None:
    schema = pa.schema([("text", pa.string())])
    texts = ["x" * (number % 50) for number in range(2000)]
    tables = (pa.table({"text": texts[start : start + 100]}, schema=schema) for start in range(0, 2000, 100))
    manifest = write_shards(folder, tables, schema, 2000, num_shards=2, row_group_bytes=4096)
    read = [row for file in manifest.files for row in pq.read_table(folder.open(file.name))["text"].to_pylist()]
    assert read == texts
    for file in manifest.files:
        shard = pq.ParquetFile(folder.open(file.name))
        sizes = [shard.read_row_group(group).nbytes for group in range(shard.num_row_groups)]
        assert len(sizes) > 2
        assert all(abs(size - 4096) < 200 for size in sizes[:-1])


def test_no_shard_is_empty(folder: Store) -> None:
    manifest = write_shards(folder, batches(3), SCHEMA, 3, num_shards=8)
    assert [file.row_groups for file in manifest.files] == [(1,), (1,), (1,)]


def test_array_columns_keep_the_shape_of_a_sample(folder: Store) -> None:
    field = array_field("image", pa.uint8(), (3, 4, 2))
    schema = pa.schema([field])
    images = np.arange(5 * 24, dtype=np.uint8).reshape(5, 3, 4, 2)
    rows = [pa.record_batch([array_column(field, images)], schema=schema)]
    (column,) = write_shards(folder, rows, schema, 5, 1).columns
    assert (column.name, column.type, column.shape) == ("image", "uint8", (3, 4, 2))
    read = pq.read_table(folder.open("part-00000.parquet"))["image"].combine_chunks().flatten()
    assert np.array_equal(read.to_numpy().reshape(5, 3, 4, 2), images)


def test_progress_adds_up_to_the_number_of_rows(folder: Store) -> None:
    seen: list[int] = []
    write_shards(folder, batches(100), SCHEMA, 100, 3, row_group_bytes=8 * ROW_BYTES, advance=seen.append)
    assert sum(seen) == 100
    assert max(seen) == 8


def test_the_source_is_never_read_far_ahead(folder: Store) -> None:
    asked, written, ahead = itertools.count(1), 0, []

    def advance(rows: int) -> None:
        nonlocal written
        written += rows
        ahead.append(taken * 10 - written)

    taken = 0

    def source() -> Iterator[pa.RecordBatch]:
        nonlocal taken
        for batch in batches(1000):
            taken = next(asked)
            yield batch

    write_shards(folder, source(), SCHEMA, 1000, 2, row_group_bytes=20 * ROW_BYTES, advance=advance)
    assert len(ahead) == 50
    assert max(ahead) <= 10


def test_the_manifest_is_written_last_and_deleted_first(store: Store) -> None:
    write_shards(store, batches(50), SCHEMA, 50, num_shards=5)
    seen: list[list[str]] = []

    def watched() -> Iterator[pa.RecordBatch]:
        for batch in batches(20):
            seen.append([entry.name for entry in store.list()])
            yield batch

    write_shards(store, watched(), SCHEMA, 20, num_shards=2)
    assert set(seen[0]) <= {"part-00000.parquet"}  # on a disk, the file that is being written is visible
    assert all(MANIFEST_NAME not in names for names in seen)
    assert [entry.name for entry in store.list()] == [MANIFEST_NAME, "part-00000.parquet", "part-00001.parquet"]
    assert values(store) == list(range(20))


def test_a_failing_source_leaves_no_data_set(store: Store) -> None:
    write_shards(store, batches(50), SCHEMA, 50, num_shards=5)

    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches(30)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(store, failing(), SCHEMA, 50, num_shards=5)
    assert store.list() == []


@pytest.mark.parametrize(("announced", "message"), [(31, "ended 1 rows before the end"), (29, "more than the 29 rows")])
def test_a_source_with_more_or_fewer_rows_than_announced_is_refused(
    folder: Store, announced: int, message: str
) -> None:
    with pytest.raises(UndulaError, match=message):
        write_shards(folder, batches(30), SCHEMA, announced, num_shards=2)
    assert folder.list() == []


def test_foreign_parquet_files_are_refused_and_not_deleted(store: Store) -> None:
    write_shards(store, batches(50), SCHEMA, 50, num_shards=2)
    store.write("mine/table.parquet", b"somebody's")
    before = store.list()
    with pytest.raises(ManifestError, match=f"^{store.url}/mine/table.parquet would become part of the data set"):
        write_shards(store, batches(20), SCHEMA, 20, num_shards=2)
    assert store.list() == before


@pytest.mark.parametrize(("num_rows", "num_shards", "row_group_bytes"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_invalid_sizes_are_refused_before_the_previous_data_set_is_deleted(
    folder: Store, num_rows: int, num_shards: int, row_group_bytes: int
) -> None:
    write_shards(folder, batches(5), SCHEMA, 5, num_shards=1)
    with pytest.raises(UndulaError, match="must be at least 1"):
        write_shards(folder, batches(num_rows), SCHEMA, num_rows, num_shards, row_group_bytes)
    assert values(folder) == list(range(5))


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = open_store(str(tmp_path / "file" / "data"))
    with pytest.raises(StorageError, match=f"^cannot write {store.url}"):
        write_shards(store, batches(5), SCHEMA, 5, num_shards=1)
