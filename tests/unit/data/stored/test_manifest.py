"""Tests of the manifest: equal data have equal digests, and any change of a file is refused by name."""

import json
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_sets import write_table

from undula.data.stored.index import index
from undula.data.stored.manifest import MANIFEST_NAME, Manifest, load_manifest
from undula.errors import ManifestError
from undula.storage import Store, open_store


def put(store: Store, name: str, table: pa.Table, row_group_rows: int = 100) -> None:
    """Write a Parquet file as another program would."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=row_group_rows)
    store.write(name, sink.getvalue().to_pybytes())


def numbers(*values: int) -> pa.Table:
    return pa.table({"value": pa.array(values, pa.int64())})


def write(store: Store, values: Sequence[int]) -> Manifest:
    return write_table(store, numbers(*values), num_shards=2, row_group_bytes=64)


def test_index_counts_files_row_groups_and_ids(store: Store) -> None:
    put(store, "b.parquet", numbers(*range(5)), row_group_rows=2)
    put(store, "a/c.parquet", numbers(*range(7)), row_group_rows=4)
    store.write("notes.txt", b"not data")
    seen: list[int] = []
    manifest = index(store.url, seen.append)
    assert seen == [1, 1]
    assert [file.name for file in manifest.files] == ["a/c.parquet", "b.parquet"]
    assert manifest.row_counts.tolist() == [4, 3, 2, 2, 1]
    assert manifest.first_ids.tolist() == [0, 4, 7, 9, 11, 12]
    assert manifest.row_group_places == ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))
    assert manifest.num_rows == 12
    assert manifest.num_bytes == sum(entry.bytes for entry in store.list() if entry.name.endswith(".parquet"))
    assert load_manifest(store.url) == manifest


def test_copies_of_a_data_set_have_the_same_digest(request: pytest.FixtureRequest, folder: Store) -> None:
    bucket = open_store(request.getfixturevalue("s3").url("elsewhere"))
    local = write(folder, range(40))
    remote = write(bucket, range(40))
    assert local.digest == remote.digest
    assert local.files[0].version != remote.files[0].version


def test_digest_changes_when_any_row_changes(folder: Store) -> None:
    digests = {write(folder, range(40)).digest}
    for row in range(0, 39, 3):
        values = list(range(40))
        values[row], values[row + 1] = values[row + 1], values[row]  # same sizes, same statistics
        digests.add(write(folder, values).digest)
    assert len(digests) == 14


def test_digest_changes_with_a_file_name_and_a_column_name(folder: Store) -> None:
    put(folder / "one", "a.parquet", numbers(1, 2))
    put(folder / "two", "b.parquet", numbers(1, 2))
    put(folder / "three", "a.parquet", numbers(1, 2).rename_columns(["other"]))
    assert len({index((folder / name).url).digest for name in ("one", "two", "three")}) == 3


def truncate(store: Store, name: str) -> None:
    store.write(name, store.read(name)[:-1])


def change_a_byte(store: Store, name: str) -> None:
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 1
    store.write(name, bytes(data))


@pytest.mark.parametrize(
    ("harm", "message"),
    [(Store.delete, "is in the manifest"), (truncate, "has changed"), (change_a_byte, "has changed")],
)
def test_a_missing_or_changed_shard_is_named(store: Store, harm: Callable[[Store, str], None], message: str) -> None:
    manifest = write(store, range(40))
    load_manifest(store.url).check_files()
    harm(store, "part-00001.parquet")
    with pytest.raises(ManifestError, match=f"^{store.url}/part-00001.parquet {message}"):
        manifest.check_files()


def test_two_columns_of_one_name_are_refused(folder: Store) -> None:
    put(folder, "a.parquet", pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"]))
    with pytest.raises(ManifestError, match=f"^{folder.url}/a.parquet has two columns named 'x'; rename one of them"):
        index(folder.url)


def images(shape: str | None) -> pa.Table:
    metadata = None if shape is None else {"shape": shape}
    array = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(24, dtype=np.uint8)), 12)
    return pa.table([array], schema=pa.schema([pa.field("image", array.type, metadata=metadata)]))


def test_the_shape_of_a_sample_comes_from_the_metadata_or_the_list_length(folder: Store) -> None:
    put(folder / "shaped", "a.parquet", images("[3, 2, 2]"))
    put(folder / "flat", "a.parquet", images(None))
    assert index((folder / "shaped").url).columns[0].shape == (3, 2, 2)
    assert index((folder / "flat").url).columns[0].shape == (12,)


@pytest.mark.parametrize(
    ("one", "other"),
    [(numbers(1), pa.table({"value": [1.0]})), (images("[3, 2, 2]"), images("[2, 2, 3]"))],
    ids=["type", "shape of a sample"],
)
def test_a_file_with_another_schema_is_named(folder: Store, one: pa.Table, other: pa.Table) -> None:
    put(folder, "a.parquet", one)
    put(folder, "b.parquet", other)
    with pytest.raises(ManifestError, match=f"^{folder.url}/b.parquet has another schema than a.parquet"):
        index(folder.url)
    assert not folder.exists(MANIFEST_NAME)


@pytest.mark.parametrize("shape", ["[3, 2]", "[]", "3x2x2", '"12"', "[[12]]", "12", "null"])
def test_a_shape_that_does_not_match_the_values_is_refused(folder: Store, shape: str) -> None:
    put(folder, "a.parquet", images(shape))
    with pytest.raises(ManifestError, match=f"^{folder.url}/a.parquet: column image has the shape"):
        index(folder.url)


@pytest.mark.parametrize("harm", ["empty", "text", "tail cut", "head only", "footer overwritten", "footer length 0"])
def test_broken_parquet_is_named_when_indexed(store: Store, harm: str) -> None:
    put(store, "a.parquet", numbers(*range(100)))
    put(store, "b.parquet", numbers(*range(100)))
    data = store.read("b.parquet")
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    broken = {
        "empty": b"",
        "text": b"not Parquet",
        "tail cut": data[:-1],
        "head only": data[:100],
        "footer overwritten": data[: -8 - footer_bytes] + b"\xff" * footer_bytes + data[-8:],
        "footer length 0": data[:-8] + bytes(4) + data[-4:],
    }[harm]
    store.write("b.parquet", broken)
    with pytest.raises(ManifestError, match=f"^{store.url}/b.parquet is not an intact Parquet file: \\S") as caught:
        index(store.url)
    assert "\n" not in str(caught.value)
    assert not store.exists(MANIFEST_NAME)


def without(key: str) -> Callable[[dict[str, object]], object]:
    return lambda body: {name: value for name, value in body.items() if name != key}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda body: json.dumps(body)[:200], "is not a manifest"),
        (lambda body: "", "is not a manifest"),
        (lambda body: "\udcff\udcfe", "is not a manifest"),  # which no text has
        (lambda body: [], "is not a manifest"),
        (lambda body: 3, "is not a manifest"),
        (without("digest"), "is not a manifest"),
        (without("files"), "is not a manifest"),
        (without("format"), "is not a manifest"),
        (lambda body: {**body, "files": ["a.parquet"]}, "is not a manifest"),
        (lambda body: {**body, "columns": [{"name": "value"}]}, "is not a manifest"),
        (lambda body: {**body, "format": 99}, "has format 99, but this version of Undula reads format 1"),
        (lambda body: {**body, "files": body["files"][:1]}, "does not match its own digest"),
        (lambda body: {**body, "digest": "0" * 64}, "does not match its own digest"),
    ],
)
def test_an_invalid_manifest_is_refused(
    folder: Store, edit: Callable[[dict[str, object]], object], message: str
) -> None:
    write(folder, range(10))
    edited = edit(json.loads(folder.read(MANIFEST_NAME)))
    folder.write(
        MANIFEST_NAME, (edited if isinstance(edited, str) else json.dumps(edited)).encode(errors="surrogateescape")
    )
    with pytest.raises(ManifestError, match=f"^{folder.url}/{MANIFEST_NAME} {message}"):
        load_manifest(folder.url)


def test_a_missing_manifest_is_reported_with_the_fix(store: Store) -> None:
    with pytest.raises(ManifestError, match=f"^there is no folder {store.url}; correct the path, or create"):
        load_manifest(store.url)
    store.write("part.parquet", b"")
    with pytest.raises(ManifestError, match=f"^{store.url} has no _manifest.json; .*`undula data index {store.url}`$"):
        load_manifest(store.url)


def test_folder_without_parquet_is_refused(store: Store) -> None:
    store.write("notes.txt", b"")
    with pytest.raises(ManifestError, match=f"^{store.url} has no Parquet files"):
        index(store.url)


def test_select_returns_columns_in_the_requested_order(folder: Store) -> None:
    put(folder, "a.parquet", pa.table({"x": [1], "y": [2], "z": [3]}))
    manifest = index(folder.url)
    assert [column.name for column in manifest.select(("z", "x"))] == ["z", "x"]
    assert [column.name for column in manifest.select(None)] == ["x", "y", "z"]
    with pytest.raises(
        ManifestError, match=r"^data.columns names 'w', which .* does not have; its columns are x, y, z$"
    ):
        manifest.select(("x", "w"))
