"""Moto's S3 server for benchmarks: real HTTP, in a process of its own."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import boto3

from undula.errors import needs_extra


def require_moto() -> None:
    """Check that the server is installed.

    Raises:
        SpecError: It is not; the message says what to install.
    """
    with needs_extra("dev"):
        import_module("moto.server")


@contextmanager
def s3_server(bucket: str = "bench") -> Iterator[dict[str, str]]:
    """Environment variables for clients of a server with one empty bucket, which runs for the duration of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(port)
        env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
        }
        os.environ |= env
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=bucket)
        yield env
    finally:
        server.terminate()
        server.wait()


def _await(port: int, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)  # between two attempts
    raise TimeoutError(f"moto's server did not start within {limit_s:.0f} s")
