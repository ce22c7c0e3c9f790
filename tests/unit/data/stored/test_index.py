"""Tests of indexing: which files are data, one request per file, and many files at once."""

import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from s3_server import S3Proxy

from undula.data.stored import index as indexing
from undula.data.stored import shards
from undula.data.stored.index import index, index_files, renew_copy
from undula.data.stored.listing import list_data
from undula.data.stored.manifest import FORMER_NAME, MANIFEST_NAME, load_manifest
from undula.errors import ManifestError
from undula.storage import Store, open_store
from undula.storage import store as store_module


def parquet(rows: int = 3, columns: int = 1) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({f"column {number}": range(rows) for number in range(columns)}), sink)
    return bytes(sink.getvalue().to_pybytes())


DATA = ("a.parquet", "day=1/b.parquet", "day=2/b_.parquet")
HIDDEN = ("_temporary/0/a.parquet", ".part-1.parquet", "day=1/_c.parquet", "day=1/.spark/d/e.parquet")


def test_hidden_files_are_no_data_as_for_pyarrow(store: Store) -> None:
    for name in (*DATA, *HIDDEN):
        store.write(name, parquet())
    store.write("_SUCCESS", b"")
    store.write(".a.parquet.crc", b"")
    as_pyarrow = pyarrow.dataset.dataset(store.path(), filesystem=store.filesystem)
    assert {store.path(name) for name in DATA} == set(as_pyarrow.files)
    listing = list_data(store)
    assert [entry.name for entry in listing.files] == list(DATA)
    assert listing.num_hidden == len(HIDDEN)
    assert index(store.url).num_rows == 9


def test_parquet_files_of_all_usual_names_are_data(folder: Store) -> None:
    for name in ("a.parquet", "b.PARQUET", "c.parq", "d.pq", "e.parquet.gzip", "f.snappy.parquet"):
        folder.write(name, parquet())
    assert index(folder.url).num_rows == 18


def copied(source: Store, target: Store) -> Store:
    """Copy all files to another place, where they have other modification times or ETags."""
    for entry in source.list():
        target.write(entry.name, source.read(entry.name))
    return target


@pytest.mark.parametrize("is_to_s3", [False, True])
def test_a_copy_of_a_data_set_is_known_by_its_sizes_and_footers(
    folder: Store, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, is_to_s3: bool
) -> None:
    for name in DATA:
        folder.write(name, parquet())
    manifest = index(folder.url)
    target = request.getfixturevalue("s3").url("copy") if is_to_s3 else str(tmp_path / "copy")
    copy = copied(folder, open_store(target))
    with pytest.raises(ManifestError, match="has changed since it was indexed"):
        load_manifest(copy.url).check_files()
    with caplog.at_level("WARNING", "undula"):
        renew_copy(copy.url)
    assert f"{copy.url} is a copy of {folder.url}" in caplog.text
    renewed = load_manifest(copy.url)
    renewed.check_files()
    assert renewed.digest == manifest.digest
    assert renewed == index(copy.url)
    data = copy.read(DATA[0])
    copy.write(DATA[0], data[:9] + bytes([data[9] ^ 1]) + data[10:])  # the footer is the same
    renew_copy(copy.url)
    with pytest.raises(ManifestError, match=r"a\.parquet has changed since it was indexed"):
        load_manifest(copy.url).check_files()


@pytest.mark.parametrize("content", [None, parquet(4), parquet(3, columns=2), parquet().replace(b"column", b"colour")])
def test_a_copy_with_another_file_has_changed(folder: Store, tmp_path: Path, content: bytes | None) -> None:
    folder.write("a.parquet", parquet())
    folder.write("b.parquet", parquet())
    index(folder.url)
    copy = copied(folder, open_store(str(tmp_path / "copy")))
    copy.delete("b.parquet")
    if content:
        copy.write("b.parquet", content)
    before = copy.read(MANIFEST_NAME)
    renew_copy(copy.url)
    assert copy.read(MANIFEST_NAME) == before


def test_a_copy_whose_manifest_cannot_be_written_is_refused_with_the_fix(
    folder: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("a.parquet", parquet())
    index(folder.url)
    copy = copied(folder, open_store(str(tmp_path / "copy")))

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store_module, "replace_file", refuse)
    with pytest.raises(
        ManifestError, match=r"is a copy of .* Permission denied; run `undula data index .* --out FOLDER`"
    ):
        renew_copy(copy.url)


def test_other_readers_can_read_a_data_set(folder: Store) -> None:
    folder.write("a.parquet", parquet())
    index(folder.url)
    assert pyarrow.dataset.dataset(folder.path()).count_rows() == 3


def test_a_manifest_of_the_former_name_is_read_and_replaced_and_that_of_another_tool_is_kept(folder: Store) -> None:
    folder.write("a.parquet", parquet())
    manifest = index(folder.url)
    folder.write(FORMER_NAME, folder.read(MANIFEST_NAME))
    folder.delete(MANIFEST_NAME)
    assert load_manifest(folder.url) == manifest
    index(folder.url)
    assert [entry.name for entry in folder.list()] == [MANIFEST_NAME, "a.parquet"]
    folder.write(FORMER_NAME, b'{"files": ["a.parquet"]}')
    index(folder.url)
    assert folder.exists(FORMER_NAME)


def test_the_url_itself_may_be_hidden(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / ".cache" / "_data"))
    store.write("a.parquet", parquet())
    assert index(store.url).num_rows == 3


def test_a_folder_with_hidden_files_alone_is_refused(folder: Store) -> None:
    folder.write("_temporary/a.parquet", parquet())
    with pytest.raises(ManifestError, match=r"has no Parquet files to index except 1 whose names, or those"):
        index(folder.url)


@pytest.mark.parametrize(
    ("columns", "difference"),
    [
        ({"x": pa.array([1])}, "it has no column 'y'"),
        ({"x": pa.array([1]), "y": pa.array([1.0]), "z": pa.array([1])}, "it also has a column 'z'"),
        ({"x": pa.array([1.0]), "y": pa.array([1.0])}, "column 'x' is double and not int64"),
        ({"y": pa.array([1.0]), "x": pa.array([1])}, "it has the columns in the order y, x"),
    ],
)
def test_a_file_with_another_schema_is_refused_with_the_first_difference(
    folder: Store, columns: dict[str, pa.Array], difference: str
) -> None:
    for name, table in (("a", {"x": pa.array([1]), "y": pa.array([1.0])}), ("b", columns)):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(table), sink)
        folder.write(f"{name}.parquet", sink.getvalue().to_pybytes())
    with pytest.raises(ManifestError, match=rf"/b.parquet has another schema than a.parquet: {difference}; write all"):
        index(folder.url)


@pytest.mark.parametrize("table", ["", "tables/one/"])
@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/00000000000000000000.json", r"a Delta table \(it has _delta_log/\)"),
        ("metadata/v3.metadata.json", r"an Iceberg table \(it has metadata/v3.metadata.json\)"),
        (".hoodie/hoodie.properties", r"a Hudi table \(it has .hoodie/\)"),
    ],
)
def test_a_table_with_a_log_is_refused_with_the_way_out(folder: Store, table: str, log: str, kind: str) -> None:
    folder.write(f"{table}data/part-0.parquet", parquet())
    folder.write(f"{table}{log}", b"{}")
    with pytest.raises(
        ManifestError, match=f"^{(folder / table).url.rstrip('/')} is {kind}.*; write the .*to another folder"
    ):
        index(folder.url)
    assert not folder.exists(MANIFEST_NAME)


def test_a_hidden_table_and_metadata_of_others_are_ignored(folder: Store) -> None:
    folder.write("a.parquet", parquet())
    folder.write("_old/_delta_log/0.json", b"{}")
    folder.write("metadata/notes.json", b"{}")
    folder.write("metadata/more/v1.metadata.json", b"{}")
    assert index(folder.url).num_rows == 3


def test_indexing_takes_one_request_for_each_file(bucket: Store, proxy: S3Proxy) -> None:
    for number in range(5):
        bucket.write(f"{number}.parquet", parquet(rows=20_000))
    listing = list_data(bucket)
    index_files(listing, lambda files: None)
    assert len(proxy.ranges) == 5
    assert all(last - first + 1 == shards.FOOTER_BYTES for first, last in proxy.ranges)


def test_a_large_footer_takes_a_second_request(bucket: Store, proxy: S3Proxy) -> None:
    data = parquet(columns=1000)
    assert int.from_bytes(data[-8:-4], "little") > shards.FOOTER_BYTES
    bucket.write("a.parquet", data)
    manifest = index(bucket.url)
    assert len(manifest.columns) == 1000
    (first, second) = proxy.ranges
    assert second[1] + 1 == first[0]  # no byte is fetched twice
    assert load_manifest(bucket.url) == manifest


def test_a_file_that_changes_after_it_is_listed_is_refused(store: Store) -> None:
    store.write("a.parquet", parquet(rows=3))
    listing = list_data(store)
    store.write("a.parquet", parquet(rows=4))
    with pytest.raises(ManifestError, match=f"^{store.url}/a.parquet has changed"):
        index_files(listing, lambda files: None)
    assert not store.exists(MANIFEST_NAME)


def test_many_footers_are_read_at_once_and_kept_in_order(folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(16):
        folder.write(f"{number:02}.parquet", parquet(rows=number + 1))
    together, read_footer = threading.Barrier(16, timeout=60), indexing.read_footer

    def meet(shard: shards.Shard) -> bytes:
        together.wait()
        return read_footer(shard)

    monkeypatch.setattr(indexing, "read_footer", meet)
    assert index(folder.url).row_counts.tolist() == list(range(1, 17))


def test_an_error_ends_the_reading_of_the_other_footers(folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        folder.write(f"{number:03}.parquet", parquet() if number else b"not Parquet")
    read, read_footer = [], indexing.read_footer

    def counted(shard: shards.Shard) -> bytes:
        read.append(shard.name)
        return read_footer(shard)

    monkeypatch.setattr(indexing, "FOOTERS_AHEAD", 10)
    monkeypatch.setattr(indexing, "read_footer", counted)
    with pytest.raises(ManifestError, match=r"000.parquet is not an intact Parquet file"):
        index(folder.url)
    assert len(read) <= 10


def test_the_rows_of_a_small_object_take_one_request(bucket: Store, proxy: S3Proxy) -> None:
    bucket.write("a.parquet", parquet())
    shard = shards.Shard.of(index(bucket.url), 0)
    proxy.ranges.clear()
    assert shard.row_group(0, ["column 0"]).num_rows == 3
    assert len(proxy.ranges) == 1
