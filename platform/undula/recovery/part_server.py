"""Parts of the state of a worker that is in no group any more, over HTTP: at the speed of the network, which Ray's object store lacks."""

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_urlsafe
from socketserver import TCPServer
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from undula.recovery.moves import Part, packed_parts
from undula.state.pieces import RankState

TIMEOUT_S = 20.0
"""Maximum seconds without a byte from the other process."""
SLICE_BYTES = 2**18
"""Size in bytes of what is sent within this time."""
POLL_S = 0.05
"""Seconds within which a server that is closed ends."""


@dataclass(frozen=True)
class PartAddress:
    """Where a worker serves its parts, and the token that a request must have."""

    host: str
    port: int
    token: str


class PartServer(ThreadingHTTPServer):
    """Serves parts of states in threads.

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
        Thread(target=self.serve_forever, args=(POLL_S,), daemon=True, name="undula-parts").start()

    def server_bind(self) -> None:
        """Bind the socket. HTTPServer would also look up the name of the host, which takes long where no name server answers."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def close(self) -> None:
        """Serve nothing any more, also to open connections."""
        self.states = tuple
        self.shutdown()
        self.server_close()


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
