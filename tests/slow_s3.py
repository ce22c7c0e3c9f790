"""Moto's S3 server with a delay before each answer. Its bucket has many copies of each file of a local folder.

Run as `python slow_s3.py PORT DELAY_S BUCKET FOLDER COPIES`.
"""

import io
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from moto.backends import get_backend
from moto.core import DEFAULT_ACCOUNT_ID
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.test import create_environ, run_wsgi_app


def fill(bucket: str, folder: Path, copies: int) -> None:
    """Put each file of a folder into the bucket `copies` times, without HTTP."""
    backend = get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"]
    backend.create_bucket(bucket, "us-east-1")
    for file in sorted(folder.glob("*.parquet")):
        content = file.read_bytes()
        for copy in range(copies):
            backend.put_object(bucket, f"{file.stem}/{copy:06}{file.suffix}", content)


class Answers(BaseHTTPRequestHandler):
    """Handler that answers requests and keeps connections open, as stores do. Werkzeug's own server closes them."""

    protocol_version = "HTTP/1.1"
    delay_s: float
    moto = DomainDispatcherApplication(create_backend_app)

    def do_GET(self) -> None:
        time.sleep(self.delay_s)
        data = self.rfile.read(int(self.headers["Content-Length"] or 0))
        environ = create_environ(
            self.path,
            f"http://{self.headers['Host']}",
            method=self.command,
            headers=[*self.headers.items()],
            input_stream=io.BytesIO(data),
        )
        parts, status, headers = run_wsgi_app(self.moto, environ)
        content = b"".join(parts)
        self.send_response_only(int(status.partition(" ")[0]))
        if "Content-Length" not in headers:
            headers["Content-Length"] = str(len(content))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


def main(port: int, delay_s: float, bucket: str, folder: Path, copies: int) -> None:
    fill(bucket, folder, copies)
    Answers.delay_s = delay_s
    ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
