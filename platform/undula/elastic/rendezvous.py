"""Where Horovod's ranks meet: the key-value server that its HTTPStore asks (horovod/common/gloo/http_store.cc), behind a secret.

Horovod's client takes its address and port from two variables and asks for http://ADDRESS:PORT/SCOPE/KEY. With HOST:REAL_PORT/SECRET as
its address the secret becomes the first part of each path. Its own server (horovod/runner/http/http_server.py) lets anybody in.
"""

import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RendezvousServer(ThreadingHTTPServer):
    """Serves one group after another, from a thread; what a former group left or asks is not there for the next.

    Args:
        host: address of this node, which is all that it listens on.
        key: what the secret of each group begins with, for those who watch over who may ask.
    """

    daemon_threads = True

    def __init__(self, host: str, key: str | None = None):
        super().__init__((host, 0), _Handler)
        self.values: dict[str, bytes] = {}
        self._key = key or ""
        self._secret = ""
        threading.Thread(target=self.serve_forever, name="horovod-rendezvous", daemon=True).start()

    def begin_group(self) -> dict[str, str]:
        """The variables by which the ranks of a new group find it."""
        self._secret = f"{self._key}{secrets.token_hex(16)}"
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
        value = self.rfile.read(int(self.headers["Content-Length"]))
        is_admitted = self.server.admits(self.path)
        if is_admitted:
            self.server.values[self.path] = value
        self._answer(HTTPStatus.OK if is_admitted else HTTPStatus.NOT_FOUND)

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
