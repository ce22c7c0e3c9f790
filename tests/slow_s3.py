"""Moto's S3 server with a delay before each answer. Its bucket has many copies of each file of a local folder.

Run as `python slow_s3.py PORT DELAY_S BUCKET FOLDER COPIES`.
"""

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.backends import get_backend
from moto.core import DEFAULT_ACCOUNT_ID
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple


def fill(bucket: str, folder: Path, copies: int) -> None:
    """Put each file of a folder into the bucket `copies` times, without HTTP."""
    backend = get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"]
    backend.create_bucket(bucket, "us-east-1")
    for file in sorted(folder.glob("*.parquet")):
        content = file.read_bytes()
        for copy in range(copies):
            backend.put_object(bucket, f"{file.stem}/{copy:06}{file.suffix}", content)


def main(port: int, delay_s: float, bucket: str, folder: Path, copies: int) -> None:
    fill(bucket, folder, copies)
    moto = DomainDispatcherApplication(create_backend_app)

    def delayed(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        time.sleep(delay_s)
        answer: Iterable[bytes] = moto(environ, start_response)
        return answer

    class KeepAlive(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *arguments: object) -> None:
            pass

    run_simple("127.0.0.1", port, delayed, threaded=True, request_handler=KeepAlive)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
