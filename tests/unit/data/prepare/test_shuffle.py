"""Tests of the global shuffle: every order is equally likely, no row is lost, and the number of open files has a limit."""

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from undula.data.prepare import shuffle
from undula.data.prepare.shuffle import shuffled
from undula.data.prepare.sources import Source
from undula.errors import StorageError


def source(num_rows: int, rows_per_table: int = 100) -> Source:
    table = pa.table({"n": np.arange(num_rows), "text": [f"row {row}" for row in range(num_rows)]})

    def tables() -> Iterator[pa.Table]:
        for start in range(0, num_rows, rows_per_table):
            yield table.slice(start, rows_per_table)

    return Source(num_rows, table.schema, tables)


def order(rows: Source, seed: int) -> list[int]:
    table = pa.concat_tables(shuffled(rows, seed).tables())
    assert table["text"].to_pylist() == [f"row {row}" for row in table["n"].to_pylist()]
    return [int(row) for row in table["n"].to_pylist()]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buckets of about 150 rows that are dealt into at most three at once, so that 3000 rows take three levels."""
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 3000)
    monkeypatch.setattr(shuffle, "MOST_BUCKETS", 3)
    monkeypatch.setattr(shuffle, "DEAL_BYTES", 30_000)


@pytest.mark.parametrize("is_small", [False, True])
def test_a_shuffle_spreads_rows_evenly_and_loses_none(request: pytest.FixtureRequest, is_small: bool) -> None:
    if is_small:
        request.getfixturevalue("small")
    orders = [order(source(3000), seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(3000))
    tenths = np.zeros((10, 10))  # rows by the tenth from which and into which they were moved
    np.add.at(tenths, (np.array(orders[0]) // 300, np.arange(3000) // 300), 1)
    assert ((tenths - 30) ** 2 / 30).sum() < 126  # the 99.9th percentile of chi-square with 81 degrees of freedom
    assert abs(np.corrcoef(orders[0][:-1], orders[0][1:])[0, 1]) < 0.06


def test_the_order_of_a_seed_is_the_same_in_every_version() -> None:
    assert order(source(12), 7) == [10, 5, 1, 7, 3, 2, 8, 4, 9, 0, 11, 6]


def test_the_order_does_not_depend_on_the_size_of_the_tables(small: None) -> None:
    assert order(source(500, rows_per_table=7), 4) == order(source(500, rows_per_table=250), 4)


def test_a_shuffle_of_many_buckets_opens_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 150)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 100, hard))
    try:
        assert sorted(order(source(2000), 1)) == list(range(2000))  # about 290 buckets
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_row_that_is_larger_than_a_bucket_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 1)
    assert sorted(order(source(5), 3)) == list(range(5))


def test_the_files_of_a_shuffle_are_deleted_while_it_is_read(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shuffle.tempfile, "tempdir", str(tmp_path))
    tables = shuffled(source(3000), 1).tables()
    next(tables)
    before = sum(file.stat().st_size for file in tmp_path.rglob("*.arrow"))
    for _ in range(15):
        next(tables)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.arrow")) < before * 0.75
    tables.close()  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_reported_with_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(path: str, schema: pa.Schema) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shuffle.pa.ipc, "new_file", no_space)
    with pytest.raises(
        StorageError, match=r"cannot shuffle in .*undula-shuffle-\w+: No space left on device; set TMPDIR"
    ):
        list(shuffled(source(10), 1).tables())
