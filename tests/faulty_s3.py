"""HTTP proxy in front of an S3 server that injects faults into responses."""

import http.client
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import pytest

from undula.storage.s3 import forget_clients

ROLE = """<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>
<AccessKeyId>ASIAROLE</AccessKeyId><SecretAccessKey>secret</SecretAccessKey><SessionToken>token</SessionToken>
<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials><AssumedRoleUser><Arn>arn</Arn><AssumedRoleId>id</AssumedRoleId>
</AssumedRoleUser></AssumeRoleResult></AssumeRoleResponse>"""
"""Answer of STS with the credentials of a role."""
CONFIG = """[profile role]\nrole_arn = arn:aws:iam::123456789012:role/x\nsource_profile = base\nregion = us-east-1
[profile base]\naws_access_key_id = AKIABASE\naws_secret_access_key = secret\n"""
"""Configuration of AWS with a profile that assumes that role."""
Fault = Literal["503", "slow down", "reset", "truncated", "short", "slow"]
P = TypeVar("P", bound="Proxy")
_BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


class Proxy(ThreadingHTTPServer):
    """Proxy in front of an S3 server."""

    daemon_threads = True

    def __init__(self, upstream: str, handler: "type[PassOn]", port: int = 0):
        super().__init__(("127.0.0.1", port), handler)
        self.upstream = urlsplit(upstream)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *arguments: Any) -> None:
        """Ignore errors, because the tests make clients close connections in the middle of a response."""


class FaultyS3(Proxy):
    """Proxy that forwards requests and applies one fault of `faults` to each of the next range requests.

    Attributes:
        faults: Faults of the next range requests.
        ranges: (first, last) byte of each requested range.
        signed: Whether each request had credentials.
        slow_s: Delay in seconds before the first byte of a "slow" response.
        is_down: Whether all range requests are refused.
    """

    def __init__(self, upstream: str, port: int = 0):
        super().__init__(upstream, _Faulty, port)
        self.faults: deque[Fault] = deque()
        self.ranges: list[tuple[int, int]] = []
        self.signed: list[bool] = []
        self.slow_s = 3.0
        self.is_down = False


@contextmanager
def faulty_s3(upstream: str, port: int = 0) -> Iterator[FaultyS3]:
    with serving(FaultyS3(upstream, port)) as server:
        yield server


@contextmanager
def serving(server: P) -> Iterator[P]:
    """Serve requests in a thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def used(server: P, monkeypatch: pytest.MonkeyPatch) -> Iterator[P]:
    """Serve requests, among them those of this process, until the block ends."""
    with serving(server):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        forget_clients()
        yield server


def use_profile(name: str | None, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process take its credentials from a profile alone; without a name, from none."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    if name:
        monkeypatch.setenv("AWS_PROFILE", name)
    forget_clients()


class PassOn(BaseHTTPRequestHandler):
    """Handler of a proxy in front of an S3 server. It opens a connection to that server for each request."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def pass_on(self) -> None:
        """Forward a request, and answer with what comes back."""
        self.answer(*self.upstream())

    def do_GET(self) -> None:
        self.pass_on()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def upstream(self) -> tuple[int, list[tuple[str, str]], bytes]:
        length = int(self.headers.get("Content-Length") or 0)
        connection = http.client.HTTPConnection(self.server.upstream.netloc)
        connection.request(self.command, self.path, self.rfile.read(length) if length else None, dict(self.headers))
        answer = connection.getresponse()
        body = answer.read()
        kept = [
            (key, value) for key, value in answer.getheaders() if key.lower() not in ("content-length", "connection")
        ]
        if self.command == "HEAD":
            kept.append(("Content-Length", answer.getheader("Content-Length") or "0"))
        connection.close()
        return answer.status, kept, body

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes, sent: int | None = None) -> None:
        self.send_response_only(status)
        for key, value in headers:
            self.send_header(key, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
        self.wfile.flush()


class _Faulty(PassOn):
    server: FaultyS3

    def pass_on(self) -> None:
        fault = None
        self.server.signed.append("Authorization" in self.headers)
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            self.server.ranges.append((int(first), int(last)))
            fault = self.server.faults.popleft() if self.server.faults else None
        if asked and self.server.is_down:
            fault = "slow down"
        if fault in ("503", "slow down"):
            self.answer(503, [("Content-Type", "application/xml")], _BUSY if fault == "slow down" else b"")
            return
        if fault == "slow":
            time.sleep(self.server.slow_s)
        status, headers, body = self.upstream()
        if fault == "short":
            body = body[: len(body) // 2]
        self.answer(status, headers, body, sent=len(body) // 2 if fault in ("reset", "truncated") else len(body))
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault in ("reset", "truncated"):
            self.close_connection = True
