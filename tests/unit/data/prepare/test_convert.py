"""Tests of the conversion of other formats: every row arrives in columns that batches support, or is refused by name."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from source_files import ROWS, TABLE, add, saved_to_disk

from undula.cli.main import main
from undula.data import load_manifest, stream
from undula.data.prepare import webdataset
from undula.data.prepare.sources import open_source
from undula.errors import ManifestError
from undula.plan.plan import PlanSpec


def parquet(folder: Path) -> None:
    for number in range(3):
        pq.write_table(TABLE.slice(number * 19, 19), folder / f"{number}.parquet", row_group_size=5)


def csv(folder: Path) -> None:
    for number in range(3):
        pyarrow.csv.write_csv(TABLE.slice(number * 19, 19), folder / f"{number}.csv")


def json_lines(folder: Path) -> None:
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))


@pytest.mark.parametrize("make", [parquet, csv, json_lines, saved_to_disk])
def test_rows_of_a_source_keep_their_order(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    source = open_source(str(tmp_path))
    assert source.num_rows == ROWS
    for _ in range(2):  # a source can be read several times
        assert pa.concat_tables(source.tables()).to_pylist() == TABLE.to_pylist()


def test_webdataset_tars_have_one_row_per_sample(tmp_path: Path) -> None:
    for shard in range(2):
        with tarfile.open(tmp_path / f"shard-{shard}.tar", "w") as archive:
            for row in range(shard * 30, shard * 30 + 30):
                add(archive, f"train/{row:04d}.jpg", bytes([row, 255]))
                add(archive, f"train/{row:04d}.cls", str(row % 10).encode())
                add(archive, f"train/{row:04d}.meta.json", b"{}")
    rows = pa.concat_tables(open_source(str(tmp_path)).tables()).to_pylist()
    assert rows[31] == {"key": "train/0031", "jpg": bytes([31, 255]), "cls": 1, "meta_json": "{}"}
    assert len(rows) == 60


def test_lists_of_equal_length_become_arrays_and_images_become_bytes(tmp_path: Path) -> None:
    table = pa.table(
        {
            "pair": [[row, row + 1] for row in range(6)],
            "grid": [[[row, 1, 2], [3, 4, 5]] for row in range(6)],
            "image": [{"bytes": bytes([row]), "path": None} for row in range(6)],
            "kind": pa.array(["a", "b"] * 3).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "0.parquet")
    main_ok("data", "convert", str(tmp_path / "0.parquet"), "--out", str(tmp_path / "out"), "--shards", "1")
    plan = PlanSpec(global_batch=6, virtual_workers=1, shuffle="none")
    batch = next(iter(stream(str(tmp_path / "out"), plan)))
    assert batch["pair"].tolist() == table["pair"].to_pylist()
    assert batch["grid"].tolist() == table["grid"].to_pylist()
    assert batch["image"] == [bytes([row]) for row in range(6)]
    assert batch["kind"] == ["a", "b"] * 3


def main_ok(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ([[1, 2], [3]], "'c' of .* has a list of 1 values in or near row 1, but the first row has 2"),
        (pa.array([0, 1], pa.timestamp("us")), r"'c' of .* has type timestamp\[us\]"),
    ],
)
def test_an_unsupported_column_is_refused_by_name_and_can_be_left_out(
    tmp_path: Path, column: Any, problem: str
) -> None:
    pq.write_table(pa.table({"c": column, "n": [1, 2]}), tmp_path / "0.parquet")
    with pytest.raises(ManifestError, match=problem):
        list(open_source(str(tmp_path)).tables())
    assert pa.concat_tables(open_source(str(tmp_path), ("n",)).tables()).to_pylist() == [{"n": 1}, {"n": 2}]


def test_a_folder_without_supported_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ManifestError, match=r"no files to convert; supported files are \*\.parquet"):
        open_source(str(tmp_path))


def test_the_command_writes_row_groups_of_the_requested_size(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    parquet(tmp_path / "in")
    out = str(tmp_path / "out")
    main_ok(
        "data",
        "convert",
        str(tmp_path / "in"),
        "--out",
        out,
        "--shards",
        "2",
        "--row-group-mib",
        "0.0005",
        "--shuffle",
        "3",
    )
    manifest = load_manifest(out)
    assert manifest.num_rows == ROWS
    assert len(manifest.files) == 2
    assert manifest.row_counts.max() <= 22  # rows of about 24 bytes


def test_the_command_refuses_to_overwrite_its_input(tmp_path: Path) -> None:
    parquet(tmp_path)
    with pytest.raises(SystemExit):
        main(["data", "convert", str(tmp_path), "--out", f"{tmp_path}/"])
    assert len(list(tmp_path.glob("*.parquet"))) == 3


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None, 3]),
        pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int64(), 2)),
        pa.array([[1, 2], [3, None], [5, 6]]),
        pa.array(["a", None, "c"]),
    ],
)
def test_nulls_are_refused_by_column_and_row(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"values": column, "other": [1, 2, 3]}), tmp_path / "a.parquet")
    with pytest.raises(ManifestError, match=r"column 'values' of .* has a null in or near row 1"):
        list(open_source(str(tmp_path)).tables())
    assert pa.concat_tables(open_source(str(tmp_path), ("other",)).tables()).num_rows == 3


def test_an_unknown_column_is_refused_with_the_existing_columns(tmp_path: Path) -> None:
    parquet(tmp_path)
    with pytest.raises(ManifestError, match="has no column 'nope'; its columns are n, x, name"):
        open_source(str(tmp_path), ("n", "nope"))


def tar(folder: Path, samples: list[dict[str, bytes]]) -> str:
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for number, sample in enumerate(samples):
            for ending, data in sample.items():
                add(archive, f"{number:06d}.{ending}", data)
    return str(folder)


def test_a_missing_member_of_a_sample_is_refused_as_a_null(tmp_path: Path) -> None:
    url = tar(tmp_path, [{"cls": b"1"}, {"cls": b"2", "txt": b"two"}])
    with pytest.raises(ManifestError, match=r"column 'txt' of .* has a null in or near row 0"):
        open_source(url)
    assert pa.concat_tables(open_source(url, ("cls",)).tables())["cls"].to_pylist() == [1, 2]


def test_a_member_that_first_appears_late_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "BATCH_SAMPLES", 2)
    url = tar(tmp_path, [{"cls": b"1"}, {"cls": b"2"}, {"cls": b"3", "txt": b"three"}])
    with pytest.raises(
        ManifestError, match=r"sample '000002' of .* has a member 'txt', which none of the first 2 samples"
    ):
        open_source(url)


def test_a_member_that_does_not_match_its_ending_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"content of .*000000\.cls does not match its file extension"):
        open_source(tar(tmp_path, [{"cls": b"cat"}]))


def test_indexing_says_which_partitions_are_no_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "label=3").mkdir()
    parquet(tmp_path / "label=3")
    main_ok("data", "index", str(tmp_path))
    assert (
        "the folders label=... do not become a column; `undula data convert` makes one of them"
        in capsys.readouterr().out
    )
