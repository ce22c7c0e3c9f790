"""Tests of estimates of decoded sizes: they are the memory that rows take, however small the rows are in their files."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from undula.data.prepare.write import array_column, array_field
from undula.data.stored.index import index
from undula.data.stored.manifest import NUMBER_TYPES, Manifest
from undula.data.stored.reads import WindowReads
from undula.data.stored.shards import Shard

ROWS = 1000


def written(folder: Path, table: pa.Table, **options: object) -> Manifest:
    pq.write_table(table, folder / "part.parquet", row_group_size=ROWS, **options)
    return index(str(folder))


def decoded(manifest: Manifest, columns: tuple[str, ...] | None = None) -> list[int]:
    """Return the actual size in bytes of each decoded row group."""
    names = [column.name for column in manifest.select(columns)]
    shard = Shard.of(manifest, 0)
    return [shard.row_group(number, names).nbytes for number in range(len(manifest.row_counts))]


def estimated(manifest: Manifest, columns: tuple[str, ...] | None = None) -> list[int]:
    reads = WindowReads(manifest, manifest.select(columns))
    return [reads.decoded_bytes(number, int(rows)) for number, rows in enumerate(manifest.row_counts)]


@pytest.mark.parametrize("name", sorted(NUMBER_TYPES))
def test_numbers_of_every_type_are_estimated_exactly(tmp_path: Path, name: str) -> None:
    values = pa.array(np.zeros(ROWS + 3)).cast(pa.type_for_alias(name))
    schema = pa.schema([pa.field("x", values.type, nullable=False), ("other", values.type)])
    manifest = written(tmp_path, pa.table([values, values], schema))
    assert estimated(manifest, ("x",)) == decoded(manifest, ("x",))


def test_arrays_that_compress_well_are_estimated_by_their_shape(tmp_path: Path) -> None:
    field = array_field("mask", pa.uint8(), (100, 100))
    masks = array_column(field, np.zeros((ROWS, 100, 100), np.uint8))
    manifest = written(tmp_path, pa.Table.from_arrays([masks], schema=pa.schema([field])))
    assert manifest.files[0].row_group_bytes[0] < 2**20
    assert estimated(manifest) == decoded(manifest) == [ROWS * 10_000]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_text_that_compresses_well_is_measured(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"x": np.arange(3 * ROWS), "text": pa.array(["ab" * 500] * 3 * ROWS, kind)})
    manifest = written(tmp_path, table)
    assert manifest.files[0].row_group_bytes[0] < 100_000
    assert estimated(manifest) == pytest.approx(decoded(manifest), rel=0.01)
    assert estimated(manifest, ("text",)) == pytest.approx(decoded(manifest, ("text",)), rel=0.01)


def test_an_estimate_is_never_less_than_the_encoded_size(tmp_path: Path) -> None:
    texts = ["a"] * ROWS + [f"{row:01000}" for row in range(ROWS)]
    manifest = written(tmp_path, pa.table({"text": texts}), use_dictionary=False)
    small, large = estimated(manifest)
    assert small < 50_000
    assert large >= manifest.files[0].row_group_bytes[1] > 1_000_000


def test_text_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = written(tmp_path, pa.table({"text": ["a" * 100] * ROWS * 2}))
    before = estimated(manifest)
    monkeypatch.delattr(Shard, "row_group")
    assert estimated(manifest) == before


def test_columns_that_are_not_read_do_not_count(tmp_path: Path) -> None:
    manifest = written(tmp_path, pa.table({"x": np.arange(ROWS), "blob": [bytes(1000)] * ROWS}))
    assert estimated(manifest, ("x",)) == [8 * ROWS]
