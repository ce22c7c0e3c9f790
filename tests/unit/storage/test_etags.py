"""Tests of conditional reads against servers that take If-Match in different forms."""

from collections.abc import Iterator
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_server import S3Proxy, Takes
from storage_kit import used

from undula.data.stored.index import index
from undula.data.stored.manifest import Manifest
from undula.data.stored.shards import Shard
from undula.errors import ManifestError, StorageError
from undula.storage import Store, open_store
from undula.storage.s3_requests import bare, is_same

TABLE = pa.table({"a": range(100)})
SENT: dict[Takes, list[str]] = {
    "quoted": ['"{}"'] * 3,
    "bare": ['"{}"', "{}", "{}"],
    "ignored": ['"{}"'] * 3,
    "refused": ['"{}"', "{}"],
}
"""Conditions of three reads, with the ETag in place of the braces."""


@pytest.fixture(params=get_args(Takes))
def server(
    request: pytest.FixtureRequest, s3: Any, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Proxy]:
    with used(S3Proxy(s3_endpoint, request.param), monkeypatch) as running:
        yield running


@pytest.fixture
def store(s3: Any, server: S3Proxy) -> Store:
    found = open_store(s3.url("data"))
    write(found, TABLE)
    return found


def write(store: Store, table: pa.Table, name: str = "a.parquet") -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    store.write(name, sink.getvalue().to_pybytes())


def shards_of(manifest: Manifest) -> list[Shard]:
    return [Shard(manifest.store, file.name, file.bytes, file.version) for file in manifest.files]


def test_a_data_set_is_read_from_every_server(store: Store, server: S3Proxy) -> None:
    (shard,) = shards_of(index(store.url))
    assert shard.row_group(0, ("a",)).equals(TABLE)
    with store.open("a.parquet") as file:
        assert pq.read_table(file).equals(TABLE)


def test_the_form_that_a_server_takes_is_learned_once(store: Store, server: S3Proxy) -> None:
    (entry,) = store.list()
    shard = Shard(store, entry.name, entry.bytes, entry.version)
    for _ in range(3):
        shard.footer()
    assert server.conditions == [form.format(entry.version.removeprefix("etag ")) for form in SENT[server.takes]]


def test_a_changed_object_is_refused_by_every_server(store: Store, server: S3Proxy) -> None:
    (shard,) = shards_of(index(store.url))
    write(store, pa.table({"a": range(100, 200)}))
    for _ in range(3):  # what is learned from the refusal must not let the fourth request through
        with pytest.raises(ManifestError, match=f"^{store.url}/a.parquet has changed since it was indexed"):
            shard.row_group(0, ("a",))


def test_an_open_file_is_never_of_two_versions(store: Store, server: S3Proxy) -> None:
    with store.open("a.parquet") as file:
        write(store, pa.table({"a": range(1000)}))
        with pytest.raises(StorageError, match=r"^cannot read s3://.*/data/a.parquet: .* has changed"):
            file.read()


def test_a_change_teaches_nothing(s3: Any, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is only one of the form if the object has the ETag."""
    with used(S3Proxy(s3_endpoint, "quoted"), monkeypatch) as server:
        store = open_store(s3.url("data"))
        write(store, TABLE)
        (shard,) = shards_of(index(store.url))
        write(store, pa.table({"a": range(100, 200)}))
        with pytest.raises(ManifestError):
            shard.footer()
        (shard,) = shards_of(index(store.url))
        server.conditions.clear()
        shard.footer()
        assert server.conditions == [f'"{shard.version.removeprefix("etag ")}"']


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('"abc"', "abc", True),
        ('"ABC-2"', '"abc-2"', True),
        ('W/"abc"', '"abc"', True),
        ('"abc"', '"abd"', False),
        ('"abc"', '"abc-2"', False),
    ],
)
def test_etags_are_compared_without_quotes_and_case(one: str, other: str, same: bool) -> None:
    assert is_same(one, other) == same
    assert bare(one) in one
