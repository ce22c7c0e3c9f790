"""Rendezvous of Horovod's ranks: a key-value server for its HTTPStore (horovod/common/gloo/http_store.cc), protected by a secret.

This server replaces Horovod's own (horovod/runner/http/http_server.py), which accepts unauthenticated requests. Horovod's client reads an
address and a port from two variables and requests http://ADDRESS:PORT/SCOPE/KEY. If the address is set to HOST:REAL_PORT/SECRET, the
secret becomes the first part of each path.
"""

import hmac
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

MAX_VALUE_BYTES = 2**16
"""Maximum size of a value in bytes; ranks store addresses."""


class RendezvousServer(ThreadingHTTPServer):
    """Server that runs in a thread and serves one group after another. A group can neither read nor change the values of another group.

    Args:
        host: Address of this node. The server listens on no other address.
        key: Secret that enters the secret of each group, together with fresh random bytes.
    """

    daemon_threads = True
    request_queue_size = 128  # all ranks connect at the same time, and again for each request

    def __init__(self, host: str, key: str | bytes | None = None):
        super().__init__((host, 0), _Handler)
        self.values: dict[str, bytes] = {}
        self._key = key.encode() if isinstance(key, str) else key or b""
        self._secret = ""
        threading.Thread(target=self.serve_forever, args=(0.1,), name="horovod-rendezvous", daemon=True).start()

    def server_bind(self) -> None:
        """Bind the socket without the base class's lookup of the host name, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def begin_group(self) -> dict[str, str]:
        """Begin a group with an empty store and a new secret, and return the environment variables with which its ranks find the server."""
        self._secret = hmac.digest(self._key, secrets.token_bytes(32), "sha256").hex()
        self.values = {}
        host, port = self.server_address[:2]
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{host!s}:{port}/{self._secret}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }

    def admits(self, path: str) -> bool:
        """Return whether a path begins with the secret of the current group."""
        _, first, *_ = [*path.split("/"), ""]
        return bool(self._secret) and secrets.compare_digest(first.partition(":")[0].encode(), self._secret.encode())


class _Handler(BaseHTTPRequestHandler):
    server: RendezvousServer
    timeout = 10

    def do_GET(self) -> None:
        value = self.server.values.get(self.path) if self.server.admits(self.path) else None
        self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not self.server.admits(self.path):
            status = HTTPStatus.NOT_FOUND
        elif not length.isdecimal() or int(length) > MAX_VALUE_BYTES:
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        else:
            self.server.values[self.path] = self.rfile.read(int(length))
            status = HTTPStatus.OK
        self._answer(status)

    def do_DELETE(self) -> None:
        """Delete a value. A rank requests this after it has connected to the others."""
        if self.server.admits(self.path):
            self.server.values.pop(self.path, None)
        self._answer(HTTPStatus.OK)

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, because paths contain the secret."""
