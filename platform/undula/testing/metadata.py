"""Simulated metadata server of a cloud on this machine. It gives notices on request, to test a job or the spot watcher."""

import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, TypeAlias, assert_never

Fault: TypeAlias = int | bytes | Literal["garbage", "slow", "hang up"]
"""Fault of an answer: an HTTP status, bytes to answer with, or one of these names."""


class MetadataServer:
    """Metadata server at a port of 127.0.0.1 that answers like those of AWS (version 2, with tokens), Google Cloud and Azure.

    Attributes:
        faults: Faults of the answers to the next requests, one for each request.
        requests: Paths that were requested.
        token_ttl_s: Maximum lifetime of a token in seconds.
        slow_s: Delay of a `slow` answer in seconds.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.token_ttl_s = 21600.0
        self.slow_s = 3.0
        self._tokens: dict[str, float] = {}
        self._deadline: datetime | None = None
        self._rebalance: datetime | None = None
        self._changed = threading.Condition()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._answer(self)

            def do_PUT(self) -> None:
                server._answer(self)

            def log_message(self, *_: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def give_notice(self, deadline_s: float) -> None:
        """Announce from now on that this machine ends in `deadline_s` seconds."""
        with self._changed:
            self._deadline = datetime.now(UTC) + timedelta(seconds=deadline_s)
            self._changed.notify_all()

    def recommend_rebalance(self) -> None:
        """Announce from now on AWS's rebalance recommendation."""
        self._rebalance = datetime.now(UTC)

    def end_tokens(self) -> None:
        """Expire all tokens."""
        self._tokens.clear()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append(request.path)
        fault = self.faults.pop(0) if self.faults else None
        headers: Mapping[str, str] = {}
        match fault:
            case "hang up":
                request.close_connection = True
                return
            case int():
                status, content = fault, b""
            case bytes():
                status, content = 200, fault
            case "garbage":
                status, content = 200, b"<html>\xff"
            case None | "slow":
                time.sleep(self.slow_s if fault else 0)
                status, body, headers = self._found(request)
                content = body.encode()
            case _:
                assert_never(fault)
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(content)

    def _found(self, request: BaseHTTPRequestHandler) -> tuple[int, str, dict[str, str]]:
        path, _, query = request.path.partition("?")
        if path.startswith("/computeMetadata/"):
            return self._gcp(request, path, query)
        if path.startswith("/metadata/"):
            return self._azure(request, path)
        return self._aws(request, path)

    def _aws(self, request: BaseHTTPRequestHandler, path: str) -> tuple[int, str, dict[str, str]]:
        if path == "/latest/api/token":
            if request.command != "PUT":
                return 405, "", {}
            wanted = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if not wanted.isdigit() or not 1 <= int(wanted) <= 21600:
                return 400, "", {}
            token = secrets.token_urlsafe(40)
            self._tokens[token] = time.monotonic() + min(float(wanted), self.token_ttl_s)
            return 200, token, {"X-aws-ec2-metadata-token-ttl-seconds": wanted}
        if self._tokens.get(request.headers.get("X-aws-ec2-metadata-token", ""), 0.0) < time.monotonic():
            return 401, "", {}
        if path == "/latest/meta-data/spot/instance-action" and self._deadline:
            return 200, json.dumps({"action": "terminate", "time": f"{self._deadline:%Y-%m-%dT%H:%M:%SZ}"}), {}
        if path == "/latest/meta-data/events/recommendations/rebalance" and self._rebalance:
            return 200, json.dumps({"noticeTime": f"{self._rebalance:%Y-%m-%dT%H:%M:%SZ}"}), {}
        return 404, "", {}

    def _gcp(self, request: BaseHTTPRequestHandler, path: str, query: str) -> tuple[int, str, dict[str, str]]:
        if request.headers.get("Metadata-Flavor") != "Google":
            return 403, "", {}
        if path != "/computeMetadata/v1/instance/preempted":
            return 404, "", {}
        options = dict(part.split("=", 1) for part in query.split("&") if "=" in part)
        with self._changed:
            if "wait_for_change" in options and options.get("last_etag") == self._etag:
                before = self._etag
                self._changed.wait_for(lambda: self._etag != before, float(options.get("timeout_sec", 60)))
            return 200, "TRUE" if self._deadline else "FALSE", {"ETag": self._etag, "Metadata-Flavor": "Google"}

    @property
    def _etag(self) -> str:
        return "preempted" if self._deadline else "running"

    def _azure(self, request: BaseHTTPRequestHandler, path: str) -> tuple[int, str, dict[str, str]]:
        if request.headers.get("Metadata") != "true":
            return 400, "", {}
        if path == "/metadata/instance/compute/name":
            return 200, "worker-7", {}
        if path != "/metadata/scheduledevents":
            return 404, "", {}
        events = [
            {
                "EventId": "1",
                "EventType": "Preempt",
                "ResourceType": "VirtualMachine",
                "Resources": [machine],
                "EventStatus": "Scheduled",
                "NotBefore": f"{self._deadline:%a, %d %b %Y %H:%M:%S} GMT",
            }
            for machine in ["worker-7"]
            if self._deadline
        ]
        return 200, json.dumps({"DocumentIncarnation": 1 + len(events), "Events": events}), {}


@contextmanager
def metadata_server() -> Iterator[MetadataServer]:
    """Run a metadata server for this block."""
    server = MetadataServer()
    thread = threading.Thread(target=server._http.serve_forever, args=(0.05,), name="undula-metadata", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server._http.shutdown()
        server._http.server_close()
        thread.join()
