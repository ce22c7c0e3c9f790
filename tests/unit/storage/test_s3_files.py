"""Tests of files on S3: few requests, in parallel where they are large, and nothing of a file that was not finished."""

import io
import random
import tarfile
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from s3_server import S3Proxy
from storage_kit import used

from undula.errors import StorageError
from undula.storage import Store, open_store, retries, s3_files, s3_requests
from undula.storage.s3 import s3_client
from undula.storage.s3_files import S3File, S3Output

CONTENT = random.Random(0).randbytes(3 * 2**20 + 17)
MIB = 2**20


@pytest.fixture
def proxy(s3_endpoint: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    with used(S3Proxy(s3_endpoint), monkeypatch) as server:
        yield server


@pytest.fixture
def store(s3: Any, proxy: S3Proxy) -> Store:
    found = open_store(s3.url("root"))
    found.write("file", CONTENT)
    proxy.authorizations.clear()
    return found


def opened(store: Store, name: str = "file") -> S3File:
    return S3File(*store.on_s3(name))


def test_a_whole_file_is_read_with_one_request(store: Store, proxy: S3Proxy) -> None:
    assert store.read("file") == CONTENT
    assert len(proxy.authorizations) == 1


def test_every_position_reads_as_in_memory(store: Store) -> None:
    draws, file, memory = random.Random(1), opened(store), io.BytesIO(CONTENT)
    for _ in range(60):
        if draws.random() < 0.5:
            offset, whence = draws.choice([(draws.randrange(len(CONTENT) + 9), 0), (-draws.randrange(99), 2)])
            assert file.seek(offset, whence) == memory.seek(offset, whence)
        size = draws.choice([1, 100, 70_000, MIB])
        assert file.read(size) == memory.read(size)
        assert file.tell() == memory.tell()
    file.seek(5)
    assert file.read() == CONTENT[5:]
    assert file.read(1) == b""


def test_small_reads_one_after_another_take_few_requests(store: Store, proxy: S3Proxy) -> None:
    file = opened(store)
    while chunk := file.read(1000):
        assert chunk
    assert len(proxy.ranges) <= 7  # of 64 KiB, 128 KiB, ...
    assert max(last - first for first, last in proxy.ranges) > MIB


def test_a_large_read_is_sent_as_parts_at_the_same_time(
    store: Store, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_requests, "PART_BYTES", MIB)
    proxy.faults.extend(["503", "truncated"])
    file = opened(store)
    assert file.read(len(CONTENT)) == CONTENT
    assert {last + 1 - first for first, last in proxy.ranges} == {MIB, 17}
    assert len(proxy.ranges) == 6  # four parts, two of them twice


def test_a_file_of_unknown_size_is_sent_in_growing_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of S3 have at least 5 MiB."""
    monkeypatch.setattr(s3_files, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(s3_files, "PARTS_BEFORE_GROWTH", 2)
    content = CONTENT * 10
    with S3Output(*store.on_s3("out")) as file:
        for start in range(0, len(content), 700_000):
            file.write(content[start : start + 700_000])
        assert file.tell() == len(content)
        assert not store.exists("out")
    assert store.read("out") == content
    assert store.list("")[-1].version.endswith("-4")  # two parts of 5 MiB, one of 10 MiB and the rest


@pytest.mark.parametrize("size", [10, 12 * MIB])
def test_a_file_that_is_not_closed_leaves_nothing(
    s3: Any, store: Store, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(s3_files, "PART_BYTES", 5 * MIB)
    file = S3Output(*store.on_s3("out"))
    file.write(bytes(size))
    del file
    assert not store.exists("out")


def test_a_failing_part_fails_the_file_and_ends_its_upload(
    s3: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_files, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(retries, "RETRY_FOR_S", 0.1)
    file = S3Output(*store.on_s3("out"))
    file.write(bytes(5 * MIB))
    (upload,) = s3_client(False).list_multipart_uploads(Bucket=s3.bucket)["Uploads"]
    s3_client(False).abort_multipart_upload(Bucket=s3.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    file.write(bytes(5 * MIB))
    with pytest.raises(StorageError, match=r"^cannot write s3://.*/root/out: "):
        file.close()
    assert not store.exists("out")


def test_tars_are_streamed(store: Store, proxy: S3Proxy) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number in range(50):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 3000
            archive.addfile(member, io.BytesIO(bytes(3000)))
    store.write("tar", packed.getvalue())
    proxy.ranges.clear()
    with store.open("tar") as raw, tarfile.open(fileobj=raw, mode="r|*") as archive:
        assert len([archive.extractfile(member).read() for member in archive]) == 50  # type: ignore[union-attr]
    assert len(proxy.ranges) <= 3


def test_arrow_reads_and_writes_data_sets(store: Store) -> None:
    table = pa.table({"a": range(1000), "day": [number % 3 for number in range(1000)]})
    pyarrow.dataset.write_dataset(
        table, store.path("set"), format="parquet", filesystem=store.filesystem, partitioning=["day"]
    )
    found = pyarrow.dataset.dataset(store.path("set"), filesystem=store.filesystem, partitioning=["day"]).to_table()
    assert sorted(found["a"].to_pylist()) == list(range(1000))
    files = store.filesystem
    files.copy_file(store.path("file"), store.path("copy"))
    files.move(store.path("copy"), store.path("moved"))
    assert store.read("moved") == CONTENT
    assert not store.exists("copy")
    files.delete_dir(store.path("set"))
    assert {entry.name for entry in store.list()} == {"file", "moved"}
    with pq.ParquetWriter(store.path("one.parquet"), table.schema, filesystem=files) as writer:
        writer.write_table(table)
    assert pq.read_table(store.path("one.parquet"), filesystem=files).equals(table)
