"""Tests of reading row groups from an S3 server behind a faulty proxy: they return the right rows or name the problem in time."""

import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from data_sets import write_table
from s3_server import Fault, S3Proxy, serving

from undula.data.stored import shards
from undula.data.stored.cache import DiskCache
from undula.data.stored.index import index
from undula.data.stored.manifest import Manifest, load_manifest
from undula.data.stored.shards import Shard
from undula.errors import ManifestError, StorageError
from undula.storage import Store, open_store, retries
from undula.storage import s3 as clients

ROWS = 4000
TABLE = pa.table({"a": np.arange(ROWS), "b": np.arange(ROWS) * 2.5, "c": np.arange(ROWS) % 7})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(retries, "LONGEST_WAIT_S", 0.1)
    monkeypatch.setattr(clients, "READ_TIMEOUT_S", 1.0)
    monkeypatch.setattr(shards, "FOOTER_BYTES", 2**13)  # smaller than the files, which are not read whole then


@pytest.fixture
def manifest(bucket: Store) -> Manifest:
    return write_table(bucket, TABLE, row_group_bytes=24_000)


def rows_of(manifest: Manifest) -> pa.Table:
    shard = Shard.of(manifest, 0)
    return pa.concat_tables([shard.row_group(number, ("a", "b", "c")) for number in range(len(manifest.row_counts))])


@pytest.mark.parametrize("fault", ["503", "slow down", "reset", "truncated", "short", "slow"])
def test_temporary_faults_do_not_change_the_rows(manifest: Manifest, proxy: S3Proxy, fault: Fault) -> None:
    shards._footers.clear()
    proxy.faults.extend([fault] * 3)
    assert rows_of(manifest).equals(TABLE)
    assert not proxy.faults


def test_parts_of_a_large_row_group_survive_faults_independently(
    manifest: Manifest, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "PART_BYTES", 1000)
    faults: list[Fault] = ["reset", "503", "truncated", "short", "slow down"]
    proxy.faults.extend(faults * 5)
    assert rows_of(manifest).equals(TABLE)
    assert not proxy.faults


def test_a_deleted_object_is_refused_by_name(manifest: Manifest, proxy: S3Proxy) -> None:
    shard = Shard.of(manifest, 0)
    shard.row_group(0, ("a",))
    open_store(manifest.url).delete(shard.name)
    with pytest.raises(ManifestError, match=f"^{shard.store.url}/{shard.name} is in the manifest but does not exist"):
        shard.row_group(1, ("a",))


def test_requests_to_a_busy_store_end_at_the_time_limit(
    manifest: Manifest, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "RETRY_FOR_S", 0.5)
    shards._footers.clear()
    proxy.faults.extend(["503"] * 10_000)
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"part-00000.parquet could not be read for .* s: 503"):
        Shard.of(manifest, 0).row_group(0, ("a",))
    assert time.monotonic() - began < 10


def test_neighbouring_columns_are_fetched_with_one_request_and_unused_columns_are_not_fetched(
    manifest: Manifest, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard.of(manifest, 0)
    shard.row_group(0, ("a",))  # fetches the footer, which is cached from here on
    proxy.ranges.clear()
    shard.row_group(0, ("a", "b", "c"))
    ((first, last),) = proxy.ranges
    monkeypatch.setattr(shards, "HOLE_BYTES", 0)
    proxy.ranges.clear()
    shard.row_group(0, ("a", "c"))
    assert len(proxy.ranges) == 2
    assert sum(end - begin + 1 for begin, end in proxy.ranges) < last - first


def test_reading_continues_after_the_store_was_down(
    manifest: Manifest, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens on the port for a while, as during the restart of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    clients.forget_clients()
    with ExitStack() as stack:
        back = threading.Timer(1.0, lambda: stack.enter_context(serving(S3Proxy(s3_endpoint, port=port))))
        back.start()
        assert rows_of(manifest).equals(TABLE)
        back.join()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"ContentRange": "bytes 0-9/4000"}, "returned another range than the requested one"),
        ({"ETag": '"other"'}, "has changed since"),
    ],
)
def test_an_answer_with_another_range_or_version_is_refused(
    manifest: Manifest, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, answer: dict[str, str], problem: str
) -> None:
    client = clients.s3_client(False)
    honest = client.get_object
    monkeypatch.setattr(client, "get_object", lambda **asked: {**honest(**asked), **answer})
    shards._footers.clear()
    with pytest.raises((ManifestError, StorageError), match=problem):
        rows_of(manifest)


def test_columns_with_dots_in_their_names_are_read(bucket: Store) -> None:
    shard = Shard.of(write_table(bucket, {"a.b": np.arange(ROWS), "a": np.arange(ROWS) * 2}), 0)
    assert shard.row_group(0, ("a.b",))["a.b"].to_pylist() == list(range(ROWS))


def test_cached_data_need_no_request_and_are_not_used_for_another_version(
    manifest: Manifest, proxy: S3Proxy, tmp_path: Path
) -> None:
    shard = replace(Shard.of(manifest, 0), cache=DiskCache(str(tmp_path), 10**6))
    first = shard.row_group(0, ("a", "b"))
    proxy.ranges.clear()
    assert shard.row_group(0, ("a", "b")).equals(first)
    assert not proxy.ranges
    changed = replace(shard, version="etag 0123")
    with pytest.raises(ManifestError, match="has changed since it was indexed"):
        changed.row_group(0, ("a", "b"))


def test_a_public_bucket_is_read_without_credentials(
    manifest: Manifest, s3: Any, proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, bucket = clients.s3_client(False), s3.bucket
    for file in client.list_objects_v2(Bucket=bucket)["Contents"]:
        client.put_object_acl(Bucket=bucket, Key=file["Key"], ACL="public-read")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    proxy.authorizations.clear()
    with pytest.raises(ManifestError, match="cannot be written there; set --out"):
        index(manifest.url, anonymous=True)
    index(manifest.url, out=str(tmp_path), anonymous=True)
    public = load_manifest(str(tmp_path))
    assert public.digest == manifest.digest
    public.check_files()
    assert rows_of(public).equals(TABLE)
    assert proxy.authorizations
    assert not any(proxy.authorizations)


def test_the_footers_that_a_process_keeps_are_limited_by_their_size(
    folder: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_table(folder, TABLE, num_shards=8, row_group_bytes=2000)
    chunks = 3 * len(manifest.row_counts)
    monkeypatch.setattr(shards, "MAX_CHUNKS", chunks // 2)
    read, footer = [], Shard.footer
    monkeypatch.setattr(Shard, "footer", lambda shard: read.append(shard.name) or footer(shard))
    footers = shards.Footers()
    all_shards = [Shard.of(manifest, place) for place in range(8)]
    for shard in [*all_shards, *all_shards[::-1]]:
        assert footers.of(shard).num_row_groups > 1
    names = [shard.name for shard in all_shards]
    assert read == [*names, *names[3::-1]]  # the last four are kept
