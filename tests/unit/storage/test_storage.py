"""Tests of files at a URL, both on a disk and on an S3 server."""

import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from undula.errors import FAILED, WRONG_INPUT, StorageError
from undula.storage import Store, named_errors, open_store, part_size, s3_requests


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Empty folder on each kind of storage."""
    return open_store(request.getfixturevalue("s3").url("root") if request.param == "s3" else str(tmp_path / "root"))


def test_a_file_has_what_was_written_last(store: Store) -> None:
    store.write("deep/er/file", b"a longer first version")
    for content in (b"", b"0123456789"):
        store.write("deep/er/file", content)
        assert store.exists("deep/er/file")
        assert store.read("deep/er/file") == content
    assert [entry.name for entry in store.list()] == ["deep/er/file"]
    assert (store / "deep" / "er").read("file") == content
    assert list(store.read_chunks("deep/er/file", 4)) == [b"0123", b"4567", b"89"]
    with store.open("deep/er/file") as file:
        file.seek(2)
        assert file.read() == content[2:]


def test_list_returns_all_files_sorted_with_their_sizes(store: Store) -> None:
    assert store.list() == []
    for name in ("b", "a/two", "a/one", "ab/three"):
        store.write(name, name.encode())
    found = [(entry.name, entry.bytes) for entry in store.list()]
    assert found == [("a/one", 5), ("a/two", 5), ("ab/three", 8), ("b", 1)]
    assert [entry.name for entry in store.list("a")] == ["a/one", "a/two"]
    assert [entry.name for entry in (store / "a").list()] == ["one", "two"]
    assert store.list("nowhere") == []


def test_the_version_changes_with_the_bytes_alone(store: Store) -> None:
    store.write("file", b"one")
    (before,) = store.list()
    assert store.list() == [before]
    store.write("file", b"two")
    (after,) = store.list()
    assert before.bytes == after.bytes
    assert before.version != after.version


def test_delete_removes_a_file_or_folder_and_nothing_else(store: Store) -> None:
    for name in ("a/one", "a/two", "ab", "b"):
        store.write(name, b"")
    store.delete("b")
    store.delete("a")
    store.delete("never there")
    assert [entry.name for entry in store.list()] == ["ab"]
    assert not store.exists("b")


def test_several_can_delete_a_folder_at_the_same_time(tmp_path: Path) -> None:
    """Two attempts of a run both delete what is superseded."""
    store, start = open_store(str(tmp_path)), threading.Barrier(4)

    def delete(name: str) -> None:
        start.wait()
        store.delete(name)

    for number in range(20):
        for file in range(50):
            store.write(f"{number}/{file}/data", b"")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(delete, [str(number)] * 4))
        assert not store.exists(str(number))


def test_a_folder_that_is_deleted_while_it_is_listed_has_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path / "store"))
    for name in ("gone/file", "kept/file"):
        store.write(name, b"")
    scan = os.scandir

    def scan_too_late(path: str) -> object:
        if Path(path).name == "gone":
            Path(path).rename(tmp_path / "elsewhere")
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_too_late)
    assert [entry.name for entry in store.list()] == ["kept/file"]
    assert (tmp_path / "elsewhere").exists()


def test_a_missing_file_is_named(store: Store) -> None:
    assert not store.exists("nowhere")
    for read in (store.read, store.open, lambda name: list(store.read_chunks(name))):
        with pytest.raises(StorageError, match=rf"^cannot read {store.url}/nowhere: \S") as caught:
            read("nowhere")
        assert "\n" not in str(caught.value)


def test_check_writable_leaves_no_file(store: Store) -> None:
    store.check_writable()
    assert store.list() == []


def test_a_reader_never_sees_a_partial_file(store: Store) -> None:
    versions = {bytes([number]) * size for number, size in enumerate((1, 300_000, 2_000_000))}
    store.write("file", b"\x00")
    done = threading.Event()

    def write() -> None:
        try:
            for _ in range(5):
                for version in versions:
                    store.write("file", version)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not done.is_set():
        seen.append(store.read("file") in versions)
        seen.append([entry.name for entry in store.list()] == ["file"])
    writer.join()
    assert seen
    assert all(seen)


def test_a_failed_write_leaves_the_former_file_and_no_other(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.write("file", b"former")
    with pytest.raises(TypeError):
        store.write("file", "text")  # type: ignore[arg-type]
    assert store.read("file") == b"former"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def answer_of_s3(status: int, code: str = "x") -> ClientError:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "GetObject")


@pytest.mark.parametrize(
    ("url", "error", "status"),
    [
        ("/full/file", OSError(errno.ENOSPC, "full"), FAILED),
        ("/full/file", OSError(errno.EACCES, "forbidden"), WRONG_INPUT),
        ("s3://bucket/key", answer_of_s3(503), FAILED),
        ("s3://bucket/key", answer_of_s3(403), WRONG_INPUT),
    ],
)
def test_a_full_or_busy_store_is_told_from_a_wrong_request(url: str, error: Exception, status: int) -> None:
    with pytest.raises(StorageError) as raised, named_errors("write", url):
        raise error
    assert raised.value.status == status


def test_a_path_below_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = open_store(str(tmp_path / "file"))
    with pytest.raises(StorageError, match=f"^cannot write {store.url}/.undula-write-test: \\S"):
        store.check_writable()


def test_every_operation_names_a_missing_bucket(request: pytest.FixtureRequest) -> None:
    bucket = request.getfixturevalue("s3").bucket
    boto3.client("s3", region_name="us-east-1").delete_bucket(Bucket=bucket)
    store = open_store(f"s3://{bucket}/root")
    with pytest.raises(StorageError, match=f"^cannot list {store.url}: .*bucket"):
        store.list()
    with pytest.raises(StorageError, match=f"^cannot read {store.url}/file: "):
        store.read("file")
    with pytest.raises(StorageError, match=f"^cannot write {store.url}/.undula-write-test: "):
        store.check_writable()


def test_missing_credentials_are_reported_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StorageError) as caught:
        open_store("s3://bucket/data")
    assert "s3://bucket/data; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in str(caught.value)


def test_an_unknown_profile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StorageError, match=r"^cannot use s3://bucket: .*nobody"):
        open_store("s3://bucket")


@pytest.mark.parametrize("url", ["gs://bucket/data", "file:///data", "S3://bucket", "s4://[x"])
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(StorageError, match="use a path or an s3:// URL"):
        open_store(url)


@pytest.mark.parametrize("url", ["s3:/bucket/data", "s3:bucket/data"])
def test_a_url_with_too_few_slashes_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match="is neither a path nor a URL; write s3://bucket/data"):
        open_store(url)


@pytest.mark.parametrize("path", ["~/run:1", "{}/run:1"])
def test_the_home_directory_is_expanded_and_a_colon_is_no_scheme(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    open_store(path.format(tmp_path)).write("file", b"1")
    assert (tmp_path / "run:1" / "file").read_bytes() == b"1"


def test_of_several_writers_one_creates_a_file(store: Store) -> None:
    assert store.create("claims/7", b"ours")
    assert not store.create("claims/7", b"theirs")
    assert store.read("claims/7") == b"ours"


def test_one_of_many_threads_creates_a_file(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with ThreadPoolExecutor(16) as threads:
        created = list(threads.map(lambda number: store.create("claim", bytes([number])), range(16)))
    assert created.count(True) == 1
    assert store.read("claim") == bytes([created.index(True)])


class Conditional:
    """S3 server whose answer to a conditional write does not arrive, or that implements none. The next request is answered."""

    def __init__(self, client: Any, status: int, is_stored: bool):
        self._client = client
        self._status = status
        self._is_stored = is_stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def put_object(self, **request: Any) -> Any:
        if "IfNoneMatch" not in request:
            return self._client.put_object(**request)
        if self._is_stored:  # botocore has sent the request twice, and S3 has carried out the first one
            self._client.put_object(**request)
        raise answer_of_s3(self._status)


@pytest.mark.parametrize(("status", "is_stored"), [(412, True), (409, True), (501, False)])
def test_a_file_is_created_although_s3_answers_with_an_error(
    s3: Any, monkeypatch: pytest.MonkeyPatch, status: int, is_stored: bool
) -> None:
    store, client = open_store(s3.url("root")), s3_requests.s3_client(False)
    monkeypatch.setattr(s3_requests, "s3_client", lambda anonymous: Conditional(client, status, is_stored))
    assert store.create("claim", b"ours")
    assert not store.create("claim", b"theirs") or status != 501
    assert store.read("claim") == b"ours"


@given(st.integers(0, 50 * 10**12))
def test_no_file_on_s3_has_too_many_parts_or_parts_of_a_wrong_size(num_bytes: int) -> None:
    """S3 accepts 10,000 parts of 5 MiB to 5 GiB."""
    size = part_size(num_bytes)
    assert num_bytes <= 10_000 * size
    assert 5 * 2**20 <= size <= 5 * 2**30
    assert size == s3_requests.PART_BYTES or size * 10_000 - num_bytes < 10_000


def test_a_file_on_s3_is_sent_in_as_few_parts_as_allowed(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of 10,000 parts is scaled down to 3. Buffers end within parts, and a part spans several buffers."""
    monkeypatch.setattr(s3_requests, "PART_BYTES", 5 * 2**20)
    monkeypatch.setattr(s3_requests, "MOST_PARTS", 3)
    store, content = open_store(s3.url("root")), random.Random(0).randbytes(20 * 2**20 + 1)
    ends = [0, 0, 1, 9 * 2**20, 9 * 2**20 + 3, len(content)]
    store.write_buffers("file", [memoryview(content)[begin:end] for begin, end in pairwise(ends)])
    assert store.read("file") == content
    assert b"".join(store.read_chunks("file")) == content
    assert store.list()[0].version.endswith("-3")  # number of parts


class Forgetful:
    """Client of a store that loses its first answer to the end of an upload, and has forgotten the upload when it is asked again."""

    def __init__(self, client: Any, stores: bool):
        self._client, self._stores, self._is_first = client, stores, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def complete_multipart_upload(self, **request: Any) -> Any:
        if self._is_first:
            self._is_first = False
            if self._stores:
                self._client.complete_multipart_upload(**request)
            raise ConnectionError("the answer was lost")
        raise answer_of_s3(404)


@pytest.mark.parametrize("stores", [True, False])
def test_an_upload_whose_answer_was_lost_counts_if_the_object_is_there(
    s3: Any, monkeypatch: pytest.MonkeyPatch, stores: bool
) -> None:
    store, client = open_store(s3.url("root")), s3_requests.s3_client(False)
    content, other = random.Random(0).randbytes(20 * 2**20), random.Random(1).randbytes(20 * 2**20)
    store.write("file", other)  # of the same size
    forgetful = Forgetful(client, stores)
    monkeypatch.setattr(s3_requests, "s3_client", lambda anonymous: forgetful)
    if stores:
        store.write("file", content)
    else:
        with pytest.raises(StorageError):
            store.write("file", content)
    assert store.read("file") == (content if stores else other)
