"""Tests of `undula data check`: it names each problem that stops or slows down training, and finds none in a good data set."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_sets import write_table

from undula.data.prepare import check as module
from undula.data.prepare.check import check
from undula.data.stored.index import index
from undula.data.stored.manifest import load_manifest
from undula.errors import Finding

ROWS = 4000
TABLE = pa.table({"x": np.arange(ROWS), "y": np.linspace(0, 1, ROWS), "name": [f"row {row}" for row in range(ROWS)]})


@pytest.fixture(autouse=True)
def scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the size limits so that small data sets reach them."""
    monkeypatch.setattr(module, "LARGE_BYTES", 128 * 2**10)
    monkeypatch.setattr(module, "SMALL_BYTES", 1024)


def write(folder: Path, table: pa.Table = TABLE, rows_in_group: int = 500) -> list[Finding]:
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "part-00000.parquet", row_group_size=rows_in_group)
    return check(index(str(folder)))


def damage(file: Path, place: int, new: bytes) -> None:
    """Overwrite bytes of a file, whose size and time stay as they are."""
    data, stat = bytearray(file.read_bytes()), file.stat()
    data[place : place + len(new)] = new
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_good_data_set_has_no_findings(tmp_path: Path) -> None:
    assert write(tmp_path) == []
    manifest, seen = write_table(tmp_path / "ours", TABLE, num_shards=2, row_group_bytes=20_000), []
    assert check(manifest, seen.append) == []
    assert sum(seen) == len(manifest.row_counts) > 2


def test_nulls_are_reported_by_row_group_and_column(tmp_path: Path) -> None:
    values = TABLE["y"].to_pylist()
    values[700] = None
    (finding,) = write(tmp_path, TABLE.set_column(1, "y", pa.array(values)))
    assert finding.severity == "error"
    assert "row group 1: column 'y' has 1 nulls" in finding.message


def test_columns_of_unsupported_types_are_reported(tmp_path: Path) -> None:
    (finding,) = write(tmp_path, TABLE.append_column("when", pa.array([0] * ROWS, pa.timestamp("us"))))
    assert finding.severity == "warning"
    assert "column 'when' has type timestamp[us]" in finding.message


@pytest.mark.parametrize(("rows_in_group", "problem"), [(ROWS, "take more than"), (5, "row groups are small")])
def test_row_groups_of_unsuitable_size_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_in_group: int, problem: str
) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", 60 * 2**10)
    monkeypatch.setattr(module, "FEW", 1)
    assert any(problem in finding.message for finding in write(tmp_path, rows_in_group=rows_in_group))


def test_row_groups_that_decode_to_more_than_fits_are_reported_with_both_sizes(tmp_path: Path) -> None:
    masks = pa.array([[0] * 1000] * ROWS, pa.list_(pa.field("element", pa.uint8(), nullable=False), 1000))
    (finding,) = write(tmp_path, pa.table({"mask": masks}), rows_in_group=2000)
    assert finding.severity == "warning"
    assert "2 of 2 row groups take more than 0.125 MiB of memory" in finding.message
    assert f"the largest is {tmp_path}/part-00000.parquet, row group 0, with 1.91 MiB decoded and 0." in finding.message
    assert "`undula data convert --row-group-mib 4`" in finding.message


def test_uneven_row_groups_are_reported(tmp_path: Path) -> None:
    for number, rows in enumerate((100, 100, 100, 2000)):
        pq.write_table(TABLE.slice(0, rows), tmp_path / f"part-{number}.parquet")
    (finding,) = check(index(str(tmp_path)))
    assert "row groups are uneven" in finding.message


def test_missing_and_damaged_shards_are_named_and_the_others_are_still_checked(tmp_path: Path) -> None:
    for number in range(3):
        pq.write_table(TABLE, tmp_path / f"part-{number}.parquet", row_group_size=500, compression="none")
    manifest = index(str(tmp_path))
    (tmp_path / "part-0.parquet").unlink()
    damaged = tmp_path / "part-1.parquet"
    damage(damaged, pq.read_metadata(damaged).row_group(3).column(0).data_page_offset, bytes([255]) * 40)
    findings = check(manifest)
    assert all(finding.severity == "error" for finding in findings)
    assert any("part-0.parquet is in the manifest but does not exist" in finding.message for finding in findings)
    assert any("part-1.parquet" in finding.message for finding in findings)
    assert not any("part-2.parquet" in finding.message for finding in findings)


def test_values_that_contradict_the_footers_statistics_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "part-0.parquet"
    pq.write_table(pa.table({"x": np.arange(100)}), path, compression="none", use_dictionary=False)
    manifest = index(str(tmp_path))
    damage(path, path.read_bytes().find((50).to_bytes(8, "little")), (5000).to_bytes(8, "little"))
    (finding,) = check(manifest)
    assert "column 'x' range from 0 to 5000, but the footer says 0 to 99" in finding.message


def test_a_damaged_footer_is_reported_even_if_size_and_time_are_unchanged(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "part-00000.parquet"
    damage(file, file.stat().st_size - 200, bytes(192))
    (finding,) = check(load_manifest(str(tmp_path)))
    assert finding.severity == "error"
    assert "is not an intact Parquet file" in finding.message


def test_half_floats_and_files_without_rows_can_be_checked(tmp_path: Path) -> None:
    half = pa.table({"x": pa.array(np.linspace(0, 1, ROWS).astype(np.float16))})
    assert not [finding for finding in write(tmp_path / "half", half) if finding.severity == "error"]
    (finding,) = write(tmp_path / "empty", TABLE.slice(0, 0))
    assert "has no rows" in finding.message
