"""Tests of which files of a source are data: nothing is mixed, doubled or dropped silently, and odd files are refused by name."""

import csv
import gzip
import json
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_files import ROWS, TABLE, arrow, encrypted, refusal, rows, saved_to_disk, tar

from undula.data.prepare import text_files
from undula.data.stored.index import index
from undula.data.stored.shards import Shard
from undula.errors import ManifestError
from undula.storage import open_store


def parquet(file: Path, **columns: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)


def test_results_of_map_in_a_saved_data_set_are_not_data(tmp_path: Path) -> None:
    saved_to_disk(tmp_path)
    arrow(tmp_path / "cache-70710d892e3e56e1.arrow", pa.table({"indices": pa.array([2, 0, 1], pa.uint64())}))
    arrow(tmp_path / "cache-7c238fed72eb949e.arrow", TABLE)
    assert rows(tmp_path) == TABLE.to_pylist()


def test_the_files_of_a_saved_data_set_are_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    names = ["data-00001-of-00003.arrow", "data-00000-of-00003.arrow"]
    saved_to_disk(tmp_path, _data_files=[{"filename": name} for name in names])
    assert [row["n"] for row in rows(tmp_path)] == [*range(19, 38), *range(19)]


def test_the_splits_of_a_saved_dictionary_are_refused_with_their_urls(tmp_path: Path) -> None:
    saved_to_disk(tmp_path / "train")
    saved_to_disk(tmp_path / "test")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    text = refusal(tmp_path)
    assert "is a DatasetDict with the splits train, test, which a data set must not mix" in text
    assert f"from its own URL: {tmp_path}/train, {tmp_path}/test" in text
    assert len(rows(tmp_path / "train")) == ROWS


def test_several_saved_data_sets_in_a_folder_are_refused(tmp_path: Path) -> None:
    saved_to_disk(tmp_path / "one")
    saved_to_disk(tmp_path / "two")
    assert "wrote in one, two; convert each of them from its own URL" in refusal(tmp_path)


@pytest.mark.parametrize(
    "state",
    [
        {"_indices_data_files": [{"filename": "indices.arrow"}]},
        {"_data_files": [{"filename": "data-00000-of-00003.arrow", "skip": 3, "take": 4}]},
    ],
)
def test_an_old_data_set_that_selects_rows_of_its_files_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    """Version 1.2.1 of datasets writes the whole files and the numbers of the selected rows."""
    saved_to_disk(tmp_path, **state)
    assert "state.json selects or reorders the rows of its files; load it and write it again" in refusal(tmp_path)


def test_a_saved_data_set_whose_file_is_missing_is_refused(tmp_path: Path) -> None:
    saved_to_disk(tmp_path, _data_files=[{"filename": "data-00007-of-00008.arrow"}])
    with pytest.raises(Exception, match=r"cannot read .*data-00007-of-00008\.arrow"):
        rows(tmp_path)


@pytest.mark.parametrize("state", ["{}", "[1", '{"_data_files": []}'])
def test_a_damaged_state_of_a_saved_data_set_is_refused(tmp_path: Path, state: str) -> None:
    saved_to_disk(tmp_path)
    (tmp_path / "state.json").write_text(state)
    assert "state.json" in refusal(tmp_path)


def test_a_cache_of_the_datasets_library_is_refused(tmp_path: Path) -> None:
    """The cache has the splits side by side, and the results of map."""
    arrow(tmp_path / "imdb-train.arrow", TABLE)
    arrow(tmp_path / "imdb-test.arrow", TABLE)
    (tmp_path / "dataset_info.json").write_text("{}")
    assert "is a cache of the datasets library" in refusal(tmp_path)
    assert len(rows(tmp_path / "imdb-test.arrow")) == ROWS


def test_an_arrow_file_with_a_footer_is_read_like_a_stream(tmp_path: Path) -> None:
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), TABLE.schema) as writer:
        writer.write_table(TABLE)
    assert rows(tmp_path) == TABLE.to_pylist()


def write_parquet(file: Path, table: pa.Table) -> None:
    pq.write_table(table, f"{file}.parquet")


def write_csv(file: Path, table: pa.Table) -> None:
    lines = [",".join(table.column_names), *(",".join(map(str, row.values())) for row in table.to_pylist())]
    Path(f"{file}.csv").write_text("\n".join(lines))


def write_json(file: Path, table: pa.Table) -> None:
    Path(f"{file}.jsonl").write_text("\n".join(map(json.dumps, table.to_pylist())))


def write_arrow(file: Path, table: pa.Table) -> None:
    arrow(Path(f"{file}.arrow"), table)


every_format = pytest.mark.parametrize("write", [write_parquet, write_csv, write_json, write_arrow])


@every_format
def test_rows_keep_their_order(tmp_path: Path, write: Callable[[Path, pa.Table], None]) -> None:
    for number in range(3):
        write(tmp_path / f"{number}", TABLE.slice(number * 19, 19))
    assert rows(tmp_path) == TABLE.to_pylist()


@every_format
def test_a_column_that_only_some_files_have_is_refused(tmp_path: Path, write: Callable[[Path, pa.Table], None]) -> None:
    write(tmp_path / "a", pa.table({"n": [1, 2]}))
    write(tmp_path / "b", pa.table({"late": [0.5], "n": [3]}))
    assert "has a column 'late', but a." in refusal(tmp_path)
    assert "has a column 'late', but a." in refusal(tmp_path, ("late",))
    assert rows(tmp_path, ("n",)) == [{"n": 1}, {"n": 2}, {"n": 3}]


@every_format
def test_numbers_of_several_types_are_promoted_without_loss(
    tmp_path: Path, write: Callable[[Path, pa.Table], None]
) -> None:
    write(tmp_path / "a", pa.table({"n": [1, 2]}))
    write(tmp_path / "b", pa.table({"n": [0.5]}))
    assert rows(tmp_path) == [{"n": 1.0}, {"n": 2.0}, {"n": 0.5}]
    write(tmp_path / "c", pa.table({"n": [2**53 + 1]}))
    assert "column 'n' of" in (text := refusal(tmp_path))
    assert "c." in text
    assert "double, does not hold exactly" in text


@every_format
def test_types_without_a_common_one_are_refused(tmp_path: Path, write: Callable[[Path, pa.Table], None]) -> None:
    write(tmp_path / "a", pa.table({"n": [1, 2]}))
    write(tmp_path / "b", pa.table({"n": ["x"]}))
    assert "column 'n' of" in (text := refusal(tmp_path))
    assert "has type int64 in a." in text
    assert "and string in b." in text


def test_encodings_of_one_type_are_joined(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", kind=pa.array(["x", "y"]).dictionary_encode(), n=pa.array([1, 2], pa.int8()))
    parquet(tmp_path / "b.parquet", kind=pa.array(["z"], pa.large_string()), n=pa.array([300], pa.int32()))
    assert rows(tmp_path) == [{"kind": "x", "n": 1}, {"kind": "y", "n": 2}, {"kind": "z", "n": 300}]


def test_text_does_not_become_bytes_because_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("name\nZoë".encode())
    (tmp_path / "b.csv").write_bytes("name\nZoë".encode("latin-1"))
    assert "has type string in a.csv and binary in b.csv" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("values", "kept"), [(("1", "2"), (1, 2)), (("ant", "b%20e"), ("ant", "b e")), (("01", "x"), ("01", "x"))]
)
def test_partitions_become_a_column(tmp_path: Path, values: tuple[str, str], kept: tuple[Any, Any]) -> None:
    for value in values:
        parquet(tmp_path / f"label={value}" / "day=3" / "a.parquet", n=[1, 2])
    assert rows(tmp_path) == [{"n": n, "label": label, "day": 3} for label in kept for n in (1, 2)]
    assert rows(tmp_path, ("label",)) == [{"label": label} for label in kept for _ in (1, 2)]
    assert rows(tmp_path / f"label={values[0]}" / "day=3") == [{"n": 1}, {"n": 2}]


def test_a_partition_of_null_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "label=1" / "a.parquet", n=[1, 2])
    parquet(tmp_path / "label=__HIVE_DEFAULT_PARTITION__" / "a.parquet", n=[1, 2])
    assert "column 'label'" in (text := refusal(tmp_path))
    assert "null" in text


def test_a_file_outside_of_the_partitions_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "label=1" / "a.parquet", n=[1, 2])
    parquet(tmp_path / "b.parquet", n=[3])
    assert "label=1/a.parquet has a column 'label', but b.parquet does not" in refusal(tmp_path)


def test_hidden_files_and_folders_are_not_data(tmp_path: Path) -> None:
    for name in ("a", "_temporary/0/a", ".ipynb_checkpoints/a", ".a"):
        parquet(tmp_path / f"{name}.parquet", n=[1])
    (tmp_path / "_SUCCESS").touch()
    assert rows(tmp_path) == [{"n": 1}]


def test_a_delta_table_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", n=[1])
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "_delta_log" / "00000000000000000000.json").write_text("{}")
    assert "is a Delta table" in refusal(tmp_path)


def test_files_of_several_formats_are_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", n=[1])
    (tmp_path / "info.json").write_text('{"about": "this"}')  # many tools write some
    assert rows(tmp_path) == [{"n": 1}]
    (tmp_path / "b.csv").write_text("n\n2\n")
    assert "files of several formats, such as a.parquet and b.csv" in refusal(tmp_path)


@pytest.mark.parametrize("ending", ["csv.gz", "jsonl.gz"])
def test_compressed_text_is_read(tmp_path: Path, ending: str) -> None:
    text = {"csv.gz": "n,word\n1,one\n", "jsonl.gz": '{"n": 1, "word": "one"}\n'}[ending]
    (tmp_path / f"a.{ending}").write_bytes(gzip.compress(text.encode()))
    (tmp_path / f"empty.{ending.removesuffix('.gz')}").touch()  # as Spark writes them for empty partitions
    assert rows(tmp_path) == [{"n": 1, "word": "one"}]


@pytest.mark.parametrize("columns", [["text"], ["text", "n"]])
def test_values_of_a_csv_file_may_have_line_breaks_wherever_a_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str]
) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 512)
    written = [{"text": "\n".join(["a word, and more"] * (row % 9 + 1)), "n": row} for row in range(200)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(written)
    assert rows(tmp_path) == [{name: row[name] for name in columns} for row in written]


def test_a_single_file_of_each_format_is_a_source(tmp_path: Path) -> None:
    for write in (write_parquet, write_csv, write_json, write_arrow):
        write(tmp_path / "one", pa.table({"n": [1, 2]}))
    tar(tmp_path / "one.tar", ("0.cls", b"1"))
    for ending in ("parquet", "csv", "jsonl", "arrow"):
        assert rows(tmp_path / f"one.{ending}") == [{"n": 1}, {"n": 2}]
    assert rows(tmp_path / "one.tar") == [{"cls": 1, "key": "0"}]
    assert "other.csv does not exist" in refusal(tmp_path / "other.csv")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", b"n,n\n1,2\n", "a.csv has 2 columns with the name 'n'; rename them"),
        ("a.csv", b"n,m\n1\n", "cannot read .*/a.csv: .*Expected 2 columns, got 1"),
        ("a.csv", b"n,m\n", "no rows to convert"),
        ("a.csv", b"n,m\n1,\n", "column 'm' of .* has a null"),
        ("a.csv.gz", b"n,m\n1,2\n", "cannot read .*/a.csv.gz: "),
        ("a.jsonl", b'{"n": 1}\n{"n": ', "cannot read .*/a.jsonl: "),
        ("a.json", b'[{"n": 1}, {"n": 2}]', "cannot read .*/a.json: .*object to array"),
        ("a.json", b'{"n": []}\n{"n": [1]}', "column 'n' of .* has an empty list in the first row"),
        ("a.json", b'{"n": [[], []]}', "column 'n' of .* has an empty list in the first row"),
        ("a.json", b'{"n": {"x": 1}}', "column 'n' of .* has type struct"),
        ("a.parquet", b"", "cannot read .*/a.parquet: "),
        ("a.parquet", b"PAR1 is not enough", "cannot read .*/a.parquet: "),
        ("a.arrow", b"", "cannot read .*/a.arrow: "),
        ("a.tar", b"no tar", "a.tar is not an intact tar archive: "),
        ("a.tar", b"", "a.tar is not an intact tar archive: "),
        ("a.tar.gz", gzip.compress(b"no tar", mtime=0)[:-4], "a.tar.gz is not an intact tar archive: "),
        ("notes.txt", b"", r"no files to convert; supported files are \*\.parquet"),
    ],
)
def test_an_odd_file_is_refused_by_name(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ManifestError, match=problem):
        rows(tmp_path)


def test_a_field_that_first_appears_late_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 100)
    lines = [json.dumps({"n": n}) for n in range(30)] + [json.dumps({"n": 30, "late": 1})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert "a.jsonl: JSON parse error: unexpected field; the types" in refusal(tmp_path)


def test_a_value_of_a_csv_file_that_is_late_and_of_another_type_is_refused_with_its_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 100)
    (tmp_path / "a.csv").write_text("n,price\n" + "1,2\n" * 100 + "3,none\n")
    assert "a.csv: In CSV column 'price': Row #102: CSV conversion error to int64: invalid value" in refusal(tmp_path)


def test_a_line_of_two_megabytes_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 2**21}) + "\n" + json.dumps({"text": "y"}))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.csv").write_text("n,text\n1," + "x" * 2**21 + "\n2,y\n")
    assert [len(row["text"]) for row in rows(tmp_path / "a.jsonl")] == [2**21, 1]
    assert [len(row["text"]) for row in rows(tmp_path / "b")] == [2**21, 1]


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ([1, None, 3], "a null in or near row 1"),
        (["a", None, "c"], "a null in or near row 1"),
        (pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int64(), 2)), "a null in or near row 1"),
        ([[1, 2], [3, None], [5, 6]], "a null in or near row 1"),
        ([{"bytes": b"x", "path": "x"}, None, {"bytes": b"z", "path": "z"}], "a null in or near row 1"),
        ([[1, 2], [3], [4, 5]], "a list of 1 values in or near row 1, but the first row has 2"),
        (pa.array([0, 1, 2], pa.timestamp("us")), "type timestamp[us]"),
    ],
)
def test_a_column_that_batches_cannot_hold_is_refused_by_name_and_can_be_left_out(
    tmp_path: Path, column: Any, problem: str
) -> None:
    parquet(tmp_path / "a.parquet", c=column, n=[1, 2, 3])
    assert f"column 'c' of {tmp_path} has {problem}" in refusal(tmp_path)
    assert rows(tmp_path, ("n",)) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_an_unknown_column_is_refused_with_the_existing_columns(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", n=[1], x=[2])
    assert "has no column 'nope'; its columns are n, x" in refusal(tmp_path, ("n", "nope"))


def test_sources_on_s3_are_read(s3: Any, tmp_path: Path) -> None:
    saved_to_disk(tmp_path / "saved")
    arrow(tmp_path / "saved" / "cache-1.arrow", TABLE)
    parquet(tmp_path / "hive" / "label=3" / "a.parquet", n=[1])
    tar(tmp_path / "tars" / "a.tar", ("0.cls", b"7"))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"n\n5\n"))
    bucket = open_store(s3.url("data"))
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        bucket.write(file.relative_to(tmp_path).as_posix(), file.read_bytes())
    assert rows(s3.url("data/saved")) == TABLE.to_pylist()
    assert rows(s3.url("data/hive")) == [{"n": 1, "label": 3}]
    assert rows(s3.url("data/tars/a.tar")) == [{"cls": 7, "key": "0"}]
    assert rows(s3.url("data/a.csv.gz")) == [{"n": 5}]
    assert "data/b.csv does not exist" in refusal(s3.url("data/b.csv"))


def tensors(*shape: int, has_null: bool = False) -> pa.Array:
    """Return two tensors, of which the second one may be null."""
    values = pa.array(
        [[0.0] * prod(shape), None if has_null else [1.0] * prod(shape)], pa.list_(pa.float64(), prod(shape))
    )
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float64(), shape), values)


def test_tensors_that_are_null_are_refused_by_name(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", x=tensors(2, 3, has_null=True))
    assert refusal(tmp_path).startswith(
        f"column 'x' of {tmp_path}/a.parquet has nulls in place of tensors; replace them"
    )


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (6,)])
def test_tensors_of_several_shapes_are_refused_with_both_files(tmp_path: Path, shape: tuple[int, ...]) -> None:
    parquet(tmp_path / "a.parquet", x=tensors(2, 3))
    parquet(tmp_path / "b.parquet", x=tensors(*shape))
    text = refusal(tmp_path)
    assert (
        f"column 'x' of {tmp_path} has type fixed_size_list<item: fixed_size_list<item: double>[3]>[2] in a.parquet"
        in text
    )
    assert f"[{shape[0]}] in b.parquet; write all files with one type" in text


@pytest.mark.parametrize("has_plain_footer", [True, False])
def test_an_encrypted_file_is_refused_by_name(tmp_path: Path, has_plain_footer: bool) -> None:
    parquet(tmp_path / "a.parquet", **TABLE.to_pydict())
    manifest = index(str(tmp_path))
    encrypted(tmp_path / "a.parquet", has_plain_footer)
    sentence = f"{tmp_path}/a.parquet is encrypted, and Undula has no keys for Parquet files; write its rows to"
    assert sentence in refusal(tmp_path)
    with pytest.raises(ManifestError, match=re.escape(sentence)):
        index(str(tmp_path))
    (entry,) = (entry for entry in manifest.store.list() if entry.name == "a.parquet")
    with pytest.raises(ManifestError, match=re.escape(sentence)):
        Shard(manifest.store, entry.name, entry.bytes, entry.version).row_group(0, ["n"])


def test_a_column_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", n=[1])
    assert "--columns names 'n' twice" in refusal(tmp_path, ("n", "n"))


def text_of_ids(file: Path, *ids: object) -> None:
    """Write a file of text, with a column of integers beside the ids."""
    rows = [f"{value},9007199254740993" for value in ids]
    if ".json" in file.name:
        rows = [f'{{"id":\n{value}, "n": 9007199254740993}}' for value in ids]
    text = "\n".join(rows if ".json" in file.name else ["id,n", *rows]).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.jsonl", "a.json.gz"])
def test_integers_that_would_be_rounded_are_refused_with_the_value(tmp_path: Path, name: str) -> None:
    where = f"column 'id' of {tmp_path}/{name}"
    for integer, other in [(2**53 + 1, 0.5), (2**63 + 1, 2**63), (-(2**64) - 1, 7), (10**400, 1)]:
        text_of_ids(tmp_path / name, 1, integer, other)
        assert f"{where} has the integer {integer} beside fractions or integers of 2^63 or more" in refusal(tmp_path)
        assert rows(tmp_path, ("n",)) == [{"n": 2**53 + 1}] * 3
    for numbers in ((1e30, 0.5), (6.02e23, 1.5e21), (2**53, 0.5), (10**22, 1.5)):
        text_of_ids(tmp_path / name, *numbers)
        assert [row["id"] for row in rows(tmp_path)] == list(numbers)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_integers_behind_a_byte_order_mark_that_would_be_rounded_are_refused(tmp_path: Path, name: str) -> None:
    text_of_ids(tmp_path / name, 2**53 + 1, 0.5)
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert "has the integer 9007199254740993 beside fractions" in refusal(tmp_path)


def test_integers_in_lists_that_would_be_rounded_are_refused(tmp_path: Path) -> None:
    text_of_ids(tmp_path / "a.jsonl", [1.5, 2], [0, 2**53 + 1])
    assert "has the integer 9007199254740993 beside fractions" in refusal(tmp_path)
