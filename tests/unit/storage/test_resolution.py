"""Tests of credentials, proxies and regions: every operation on S3 resolves them in the same way."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_server import PassOn, S3Proxy
from storage_kit import CONFIG, ROLE, use_profile, used

from undula.data.stored.index import index
from undula.data.stored.shards import Shard
from undula.errors import StorageError
from undula.storage import Store, open_store
from undula.storage.s3 import forget_clients


class Recorder(S3Proxy):
    """S3 server that is also STS, and an HTTP proxy for both."""

    def __init__(self, upstream: str):
        super().__init__(upstream, handler=_Recording)
        self.requests: list[tuple[str, str]] = []
        """Access key and path of each request to S3."""
        self.roles = 0
        """Number of requests to STS."""


class _Recording(PassOn):
    server: Recorder

    def pass_on(self) -> None:
        if self.command == "POST" and self.path.rstrip("/") in ("", "http://sts.invalid"):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.server.roles += 1
            self.answer(200, [("Content-Type", "text/xml")], ROLE.encode())
            return
        key = self.headers.get("Authorization", "unsigned").partition("Credential=")[2].partition("/")[0]
        self.server.requests.append((key, self.path))
        self.path = self.path.removeprefix("http://s3.invalid")
        self.headers.replace_header("Host", self.server.upstream.netloc)
        super().pass_on()


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("a.parquet"),
    "read_chunks": lambda store: list(store.read_chunks("a.parquet")),
    "open": lambda store: pq.read_table(store.open("a.parquet")),
    "list": lambda store: store.list(),
    "names": lambda store: store.names("folder"),
    "exists": lambda store: store.exists("a.parquet"),
    "write": lambda store: store.write("b", b"1"),
    "create": lambda store: store.create("c", b"1"),
    "delete": lambda store: store.delete("b"),
    "arrow reads": lambda store: pq.read_table(store.path("a.parquet"), filesystem=store.filesystem),
    "arrow lists": lambda store: store.filesystem.get_file_info(pa.fs.FileSelector(store.path(), recursive=True)),
    "arrow writes": lambda store: pq.write_table(TABLE, store.path("d.parquet"), filesystem=store.filesystem),
}
"""Each way in which the platform uses S3."""
TABLE = pa.table({"a": range(100)})


@pytest.fixture
def store(s3: Any) -> Store:
    """Folder with a file, written directly."""
    found = open_store(s3.url("root"))
    write_table(found, "a.parquet", TABLE)
    return found


def write_table(store: Store, name: str, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    store.write(name, sink.getvalue().to_pybytes())


@pytest.fixture
def recorder(store: Store, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    with used(Recorder(s3_endpoint), monkeypatch) as server:
        yield server


def test_every_operation_assumes_the_role_of_a_profile(
    store: Store, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(CONFIG)
    use_profile("role", tmp_path / "config", monkeypatch)
    open_store(store.url)
    for name, operation in OPERATIONS.items():
        recorder.requests.clear()
        operation(store)
        assert {key for key, _ in recorder.requests} == {"ASIAROLE"}, name
    assert recorder.roles == 1


def test_every_operation_uses_the_proxy(store: Store, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint's host does not exist, so only the proxy can reach it."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, recorder.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://s3.invalid")
    forget_clients()
    for name, operation in OPERATIONS.items():
        recorder.requests.clear()
        operation(store)
        assert recorder.requests, name
        assert all(path.startswith("http://s3.invalid/") for _, path in recorder.requests), name


@pytest.fixture
def elsewhere(store: Store, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """S3 server whose buckets are all in another region than the one that is configured."""
    with used(S3Proxy(s3_endpoint, region="eu-west-1"), monkeypatch) as server:
        yield server


def test_every_operation_follows_a_redirection_to_another_region(store: Store, elsewhere: S3Proxy) -> None:
    for name, operation in OPERATIONS.items():
        forget_clients()
        elsewhere.authorizations.clear()
        operation(store)
        assert "/us-east-1/s3/" in elsewhere.authorizations[0], name
        assert "/eu-west-1/s3/" in elsewhere.authorizations[-1], name


def test_a_region_is_found_out_once_per_bucket(store: Store, elsewhere: S3Proxy) -> None:
    for _ in range(3):
        store.read("a.parquet")
    wrong = [signature for signature in elsewhere.authorizations if "/us-east-1/s3/" in signature]
    assert 1 <= len(wrong) <= 2  # the first request, and perhaps a question for the region


def test_data_and_runs_can_be_in_different_regions(store: Store, elsewhere: S3Proxy, s3_endpoint: str) -> None:
    """Neither region is the configured one. Requests to the two buckets alternate."""
    other = f"{store.path().partition('/')[0]}-runs"
    boto3.client("s3", region_name="us-east-1", endpoint_url=s3_endpoint).create_bucket(Bucket=other)
    elsewhere.regions[other] = "ap-south-1"
    runs = open_store(f"s3://{other}/runs")
    for number in range(3):
        assert pq.read_table(store.open("a.parquet")).equals(TABLE)
        runs.write(f"{number}", b"1")
    assert runs.names("") == {"0", "1", "2"}
    used = [each for each in ("us-east-1", "eu-west-1", "ap-south-1") if f"/{each}/s3/" in elsewhere.authorizations[-1]]
    assert used == ["ap-south-1"]


def test_the_region_of_aws_region_comes_first(store: Store, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    with used(S3Proxy(s3_endpoint, region="eu-west-1"), monkeypatch) as server:
        store.read("a.parquet")
        assert len(server.authorizations) == 1


def test_keys_are_exact(s3: Any) -> None:
    """Two slashes are part of a key: `x/a` and `x//a` are two objects, with their own sizes and ETags."""
    store, client = open_store(s3.url("root")), boto3.client("s3", region_name="us-east-1")
    keys = {"x/a": b"one", "x//a": b"three", "/b": b"", "x/./c": b"dot", "x/../d": b"dots"}
    for key, content in keys.items():
        client.put_object(Bucket=s3.bucket, Key=f"root/{key}", Body=content)
    assert {entry.name: entry.bytes for entry in store.list()} == {key: len(content) for key, content in keys.items()}
    for key, content in keys.items():
        assert store.read(key) == content
        assert store.open(key).read() == content
        assert store.exists(key)
    assert (store / "x/").read("a") == b"three"
    assert [entry.name for entry in open_store(s3.url("root/x/") + "/").list()] == ["a"]
    store.delete("x//a")
    assert store.read("x/a") == b"one"
    assert not store.exists("x//a")


def test_files_whose_keys_differ_by_a_slash_have_their_own_rows(s3: Any) -> None:
    store = open_store(s3.url("data"))
    for name, values in {"x/a.parquet": range(10), "x//a.parquet": range(100, 130)}.items():
        write_table(store, name, pa.table({"a": values}))
    manifest = index(store.url)
    rows = {
        file.name: Shard(store, file.name, file.bytes, file.version).row_group(0, ("a",))["a"].to_pylist()
        for file in manifest.files
    }
    assert rows == {"x/a.parquet": list(range(10)), "x//a.parquet": list(range(100, 130))}


def test_a_bucket_whose_keys_begin_with_a_slash_is_read(s3: Any) -> None:
    store = open_store(f"s3://{s3.bucket}//root")
    store.write("a", b"1")
    (found,) = boto3.client("s3", region_name="us-east-1").list_objects_v2(Bucket=s3.bucket)["Contents"]
    assert found["Key"] == "/root/a"
    assert store.read("a") == b"1"


def test_a_missing_folder_of_arrow_is_not_found(s3: Any) -> None:
    filesystem = open_store(s3.url("root")).filesystem
    assert filesystem.get_file_info(f"{s3.bucket}/nowhere").type == pa.fs.FileType.NotFound
    with pytest.raises(FileNotFoundError):
        filesystem.open_input_file(f"{s3.bucket}/nowhere")
    with pytest.raises(FileNotFoundError):
        filesystem.get_file_info(pa.fs.FileSelector(f"{s3.bucket}/nowhere"))


def test_forbidden_requests_are_refused_in_one_line(s3: Any, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"^cannot read s3://\S+/a.parquet: [^\n]*$") as caught:
        Store(store.url, anonymous=True).read("a.parquet")
    assert "max retries" not in str(caught.value)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)
