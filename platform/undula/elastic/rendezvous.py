"""Where Horovod's ranks meet: the key-value server that its HTTPStore asks (horovod/common/gloo/http_store.cc), behind a secret.

Horovod's client takes its address and port from two variables and asks for http://ADDRESS:PORT/SCOPE/KEY. With HOST:REAL_PORT/SECRET as
its address the secret becomes the first part of each path. Its own server (horovod/runner/http/http_server.py) lets anybody in.
"""

import hmac
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

MAX_VALUE_BYTES = 2**16
"""Of a value: ranks leave addresses."""


class RendezvousServer(ThreadingHTTPServer):
    """Serves one group after another, from a thread; what a former group left or asks is not there for the next.

    Args:
        host: address of this node, which is all that it listens on.
        key: a secret from which that of each group is derived, beside what is drawn anew for each.
    """

    daemon_threads = True
    request_queue_size = 128  # all ranks ask at once, each time on a connection of its own

    def __init__(self, host: str, key: str | bytes | None = None):
        super().__init__((host, 0), _Handler)
        self.values: dict[str, bytes] = {}
        self._key = key.encode() if isinstance(key, str) else key or b""
        self._secret = ""
        threading.Thread(target=self.serve_forever, args=(0.1,), name="horovod-rendezvous", daemon=True).start()

    def server_bind(self) -> None:
        """Without a look at the name of the host, which can take a name server's seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def begin_group(self) -> dict[str, str]:
        """The variables by which the ranks of a new group find it."""
        self._secret = hmac.digest(self._key, secrets.token_bytes(32), "sha256").hex()
        self.values = {}
        host, port = self.server_address[:2]
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{host!s}:{port}/{self._secret}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }

    def admits(self, path: str) -> bool:
        """Whether a path begins with the secret of the group that meets."""
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
        """A rank has met the others."""
        if self.server.admits(self.path):
            self.server.values.pop(self.path, None)
        self._answer(HTTPStatus.OK)

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """The paths hold the secret."""
