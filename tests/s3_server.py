"""S3 servers of tests and benchmarks: moto's in a process of its own, and a proxy in front of it that injects faults or is strict.

Run as `python s3_server.py PORT DELAY_S BUCKET FOLDER COPIES`, it is moto's server with a delay before each answer, and its bucket has
COPIES of each Parquet file of a local folder.
"""

import http.client
import io
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

Fault = Literal["503", "slow down", "reset", "truncated", "short", "slow"]
Takes = Literal["quoted", "bare", "ignored", "refused"]
"""Treatment of If-Match. `quoted`: an ETag without quotes is an invalid request, as for Cloudflare R2. `bare`: an ETag with quotes differs
from that of every object. `ignored`: conditions are always true. `refused`: they are not implemented."""
P = TypeVar("P", bound="S3Proxy")


def client_env(endpoint: str) -> dict[str, str]:
    """Return the environment variables with which clients find a server."""
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    return {"AWS_ENDPOINT_URL": endpoint, **keys, "AWS_REGION": "us-east-1"}


@contextmanager
def moto_server(*filled: object, limit_s: float = 60.0) -> Iterator[str]:
    """Start moto's S3 server in a process of its own, and return its URL. Clients use real HTTP; only the storage is simulated.

    Args:
        filled: Delay and content of the server, as in the command line of this module; by default it is empty and without a delay.
        limit_s: Maximum time in seconds that the start may take.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    moto = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    command = [sys.executable, *([__file__, str(port), *map(str, filled)] if filled else moto)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(server, port, limit_s)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _await(server: subprocess.Popen[bytes], port: int, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        assert server.poll() is None, f"the S3 server ended with {server.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(f"the S3 server does not listen after {limit_s} s")


class S3Proxy(ThreadingHTTPServer):
    """Proxy in front of an S3 server, which records the requests.

    Attributes:
        authorizations: Value of Authorization of each request; empty for one without credentials.
        ranges: (first, last) byte of each requested range.
        conditions: Values of If-Match of the requests.
        faults: Faults of the next range requests, one for each.
        slow_s: Delay in seconds before the first byte of a "slow" response.
        is_down: Whether all range requests are refused.
        takes: Treatment of If-Match; None for that of the server behind.
        region: Region of all buckets. Requests that are signed for another one are refused with a redirection to it; None accepts any.
        regions: Regions of single buckets, which come before `region`.
    """

    daemon_threads = True

    def __init__(
        self,
        upstream: str,
        takes: Takes | None = None,
        region: str | None = None,
        port: int = 0,
        handler: "type[PassOn] | None" = None,
    ):
        super().__init__(("127.0.0.1", port), handler or PassOn)
        self.upstream = urlsplit(upstream)
        self.takes, self.region = takes, region
        self.regions: dict[str, str] = {}
        self.authorizations: list[str] = []
        self.ranges: list[tuple[int, int]] = []
        self.conditions: list[str] = []
        self.faults: deque[Fault] = deque()
        self.slow_s = 3.0
        self.is_down = False

    @property
    def url(self) -> str:
        """Value for AWS_ENDPOINT_URL."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *arguments: Any) -> None:
        """Ignore errors, because the tests make clients close connections in the middle of a response."""


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


class _Handler(BaseHTTPRequestHandler):
    """Handler that keeps connections open, as stores do."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def body(self) -> bytes:
        """Return the body of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

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


class PassOn(_Handler):
    """Handler of a proxy. It opens a connection to the server behind for each request."""

    server: S3Proxy

    def do_GET(self) -> None:
        self.pass_on()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def pass_on(self) -> None:
        """Refuse a request, or forward it and answer with what comes back, unless a fault comes in between."""
        self.server.authorizations.append(self.headers.get("Authorization", ""))
        fault = self._fault()
        if fault in ("503", "slow down"):
            self.refuse(503, "SlowDown" if fault == "slow down" else "")
        elif refusal := self._wrong_region() or self._wrong_condition():
            self.refuse(*refusal)
        else:
            self._forward(fault)

    def _fault(self) -> Fault | None:
        """Return the fault of this request, which is noted if it is for a range."""
        if not (asked := self.headers.get("Range")):
            return None
        first, _, last = asked.removeprefix("bytes=").partition("-")
        self.server.ranges.append((int(first), int(last)))
        fault = self.server.faults.popleft() if self.server.faults else None
        return "slow down" if self.server.is_down else fault

    def _wrong_region(self) -> tuple[int, str, list[tuple[str, str]]] | None:
        bucket = urlsplit(self.path).path.split("/")[1]
        region, signature = self.server.regions.get(bucket, self.server.region), self.headers.get("Authorization")
        if region and signature and f"/{region}/s3/" not in signature:
            return 301, "PermanentRedirect", [("x-amz-bucket-region", region)]
        return None

    def _wrong_condition(self) -> tuple[int, str] | None:
        """Return how the condition of a request is refused, or change it to the form that the server behind takes."""
        etag, takes = self.headers.get("If-Match"), self.server.takes
        if etag is None or takes is None:
            return None
        self.server.conditions.append(etag)
        is_quoted = etag.startswith('"') and etag.endswith('"')
        del self.headers["If-Match"]
        if takes == "quoted" and not is_quoted:
            return 400, "InvalidArgument"
        if takes == "bare" and is_quoted:
            return 412, "PreconditionFailed"
        if takes == "refused":
            return 501, "NotImplemented"
        if takes != "ignored":
            self.headers["If-Match"] = etag if is_quoted else f'"{etag}"'
        return None

    def refuse(self, status: int, code: str, headers: list[tuple[str, str]] | None = None) -> None:
        """Answer with an error of S3, whose code may be empty."""
        self.body()
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>" if code else ""
        self.answer(status, [("Content-Type", "application/xml"), *(headers or [])], text.encode())

    def _forward(self, fault: Fault | None) -> None:
        if fault == "slow":
            time.sleep(self.server.slow_s)
        status, headers, body = self._upstream()
        if fault == "short":
            body = body[: len(body) // 2]
        self.answer(status, headers, body, sent=len(body) // 2 if fault in ("reset", "truncated") else len(body))
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault in ("reset", "truncated"):
            self.close_connection = True

    def _upstream(self) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.upstream.netloc)
        connection.request(self.command, self.path, self.body() or None, dict(self.headers))
        answer = connection.getresponse()
        body = answer.read()
        dropped = ("connection",) if self.command == "HEAD" else ("connection", "content-length")
        headers = [(key, value) for key, value in answer.getheaders() if key.lower() not in dropped]
        connection.close()
        return answer.status, headers, body


def fill(bucket: str, folder: Path, copies: int) -> None:
    """Put each file of a folder into the bucket of this process `copies` times, without HTTP."""
    from moto.backends import get_backend
    from moto.core import DEFAULT_ACCOUNT_ID

    backend = get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"]
    backend.create_bucket(bucket, "us-east-1")
    for file in sorted(folder.glob("*.parquet")):
        content = file.read_bytes()
        for copy in range(copies):
            backend.put_object(bucket, f"{file.stem}/{copy:06}{file.suffix}", content)


def answers_of_moto(delay_s: float) -> type[_Handler]:
    """Return a handler that answers late. Werkzeug's own server closes connections."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.test import create_environ, run_wsgi_app

    moto: Callable[..., Any] = DomainDispatcherApplication(create_backend_app)

    class Answers(_Handler):
        def do_GET(self) -> None:
            time.sleep(delay_s)
            host, data = f"http://{self.headers['Host']}", io.BytesIO(self.body())
            asked = {"method": self.command, "headers": [*self.headers.items()], "input_stream": data}
            parts, status, headers = run_wsgi_app(moto, create_environ(self.path, host, **asked))
            dropped = () if self.command == "HEAD" else ("content-length",)
            kept = [(name, value) for name, value in headers if name.lower() not in dropped]
            self.answer(int(status.partition(" ")[0]), kept, b"".join(parts))

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    return Answers


def main(port: str, delay_s: str, bucket: str, folder: str, copies: str) -> None:
    fill(bucket, Path(folder), int(copies))
    ThreadingHTTPServer(("127.0.0.1", int(port)), answers_of_moto(float(delay_s))).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
