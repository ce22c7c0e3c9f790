"""Parts of the state of a worker that is in no group any more, over HTTP: at the speed of the network, which Ray's object store lacks."""

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_urlsafe
from socketserver import TCPServer
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from undula.recovery.moves import Part, packed_parts
from undula.state.pieces import RankState

TIMEOUT_S = 20.0
"""Maximum seconds without a byte from the other process."""
SLICE_BYTES = 2**18
"""Size in bytes of what is sent within this time."""
TOKEN_S = 5.0
"""Maximum seconds until a connection has shown the token."""
MAX_HEADER_BYTES = 4096
"""Maximum size in bytes of what comes before the token."""
POLL_S = 0.05
"""Seconds after which a connection that has sent a part of its first request is looked at again."""


@dataclass(frozen=True)
class PartAddress:
    """Where a worker serves its parts, and the token that a request must have."""

    host: str
    port: int
    token: str


class PartServer(ThreadingHTTPServer):
    """Serves parts of states in threads. A connection gets a thread when its first request has shown the token.

    Args:
        host: Address on which it listens.
        states: Function that returns the states that this process holds.

    Attributes:
        address: Address of this server.
    """

    daemon_threads = True
    request_queue_size = 1024  # all ranks of a group can connect at once

    def __init__(self, host: str, states: Callable[[], Sequence[RankState]]):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        self.states = states
        self.address = PartAddress(host, self.server_port, token_urlsafe())
        self._waiting: dict[socket.socket, float] = {}
        """Connections that have not shown the token yet, and the time until which they may."""
        self._begun: set[socket.socket] = set()
        """The connections among these from which a part of the first request has come."""
        self._is_closed = Event()
        self._thread = Thread(target=self._serve, daemon=True, name="undula-parts")
        self._thread.start()

    def server_bind(self) -> None:
        """Bind the socket. HTTPServer would also look up the name of the host, which takes long where no name server answers."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def close(self) -> None:
        """Serve nothing any more, also to open connections."""
        self.states = tuple
        self._is_closed.set()
        with suppress(OSError):  # wakes the thread
            socket.create_connection((self.address.host, self.address.port), TIMEOUT_S).close()
        self._thread.join()
        self.server_close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            while not self._is_closed.is_set():
                ready = {key.fileobj for key, _ in selector.select(POLL_S)}
                now = time.monotonic()
                late = {connection for connection, until in self._waiting.items() if now > until}
                for connection in [each for each in self._waiting if each in ready | late | self._begun]:
                    self._hear(connection, connection in late, selector)
                if self.socket in ready:
                    self._accept(selector)
            for connection in [*self._waiting]:
                self._drop(connection, selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):  # the other process has ended
            connection, _ = self.get_request()
            if len(self._waiting) >= self.request_queue_size:
                self._drop(next(iter(self._waiting)), selector)
            connection.setblocking(False)
            self._waiting[connection] = time.monotonic() + TOKEN_S
            selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket, is_late: bool, selector: selectors.BaseSelector) -> None:
        """Give a connection a thread if it has shown the token, and close it if it has not and cannot any more."""
        request = b""
        with suppress(OSError):
            request = connection.recv(MAX_HEADER_BYTES, socket.MSG_PEEK)
        headers = [line.partition(b":") for line in request.split(b"\r\n")[1:-1]]
        given = next((value.strip() for name, _, value in headers if name.lower() == b"authorization"), b"")
        if compare_digest(given, _bearer(self.address).encode()):
            self._drop(connection, selector, closes=False)
            connection.settimeout(TIMEOUT_S)
            with suppress(OSError):
                self.process_request(connection, connection.getpeername())
        elif given or not request or is_late or b"\r\n\r\n" in request or len(request) == MAX_HEADER_BYTES:
            self._drop(connection, selector)
        elif connection not in self._begun:
            selector.unregister(connection)  # it would be ready at once again, until the rest comes
            self._begun.add(connection)

    def _drop(self, connection: socket.socket, selector: selectors.BaseSelector, closes: bool = True) -> None:
        if connection in self._begun:
            self._begun.remove(connection)
        else:
            selector.unregister(connection)
        del self._waiting[connection]
        if closes:
            self.shutdown_request(connection)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the end of an answer would wait until its beginning is acknowledged
    timeout = TIMEOUT_S
    server: PartServer

    def do_POST(self) -> None:
        given = self.headers.get("Authorization", "").encode()
        if not compare_digest(given, _bearer(self.server.address).encode()):
            self.send_error(401)
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = [(name, (tuple(offsets), tuple(sizes))) for name, (offsets, sizes) in asked]
        try:
            packed: Any = packed_parts(self.server.states(), parts).numpy()
        except LookupError:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(packed.nbytes))
        self.end_headers()
        rest = memoryview(packed)
        while rest:  # the limit of time is for each slice
            self.wfile.write(rest[:SLICE_BYTES])
            rest = rest[SLICE_BYTES:]

    def log_message(self, format: str, *values: object) -> None:
        """Write nothing to the log of the worker."""


class PartClient:
    """Connection to a PartServer.

    Args:
        address: Address of the server.
    """

    def __init__(self, address: PartAddress):
        self._connection = HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)
        self._headers = {"Authorization": _bearer(address)}

    def fetch(self, parts: Sequence[Part]) -> Tensor:
        """Return parts of a state, as `packed_parts` packs them.

        Raises:
            OSError: The server was lost or does not have the parts.
        """
        try:
            self._connection.request("POST", "/", json.dumps(parts), self._headers)
            answer = self._connection.getresponse()
            if answer.status != 200:
                raise ConnectionError(f"a worker that was leaving has answered {answer.status} {answer.reason}")
            flat = torch.empty(int(answer.headers["Content-Length"]), dtype=torch.uint8, device="cpu")
            place: Any = flat.numpy()
            rest = memoryview(place)
            while rest:
                if not (received := answer.readinto(rest)):
                    raise ConnectionError("a worker that was leaving has ended its answer too early")
                rest = rest[received:]
        except HTTPException as error:
            raise ConnectionError(f"a worker that was leaving has not answered: {error!r}") from error
        return flat

    def close(self) -> None:
        """Close the connection. A thread that is fetching parts gets an error."""
        if self._connection.sock:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _bearer(address: PartAddress) -> str:
    return f"Bearer {address.token}"
