"""Test of a local cluster where little is as usual: a long folder for temporary files, names of standard modules, and a proxy."""

import os
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from undula.cluster.local import MOST_BASE, job_api_answers, local_cluster


class Refusing(BaseHTTPRequestHandler):
    """Proxy that forbids every request, as a cluster does without a token."""

    def do_GET(self) -> None:
        self.send_error(403)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def odd_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a working directory and an environment in which Ray alone would not start."""
    for module in ("string", "attr", "types"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('this is not the module that was meant')")
    monkeypatch.chdir(tmp_path)
    (long := tmp_path / ("long" * MOST_BASE)).mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "corp.example")
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    yield
    tempfile.tempdir = None
    proxy.shutdown()
    proxy.server_close()


@pytest.mark.nightly
@pytest.mark.usefixtures("odd_place")
def test_a_local_cluster_starts_in_an_odd_place(forking_python: str) -> None:
    with local_cluster(num_cpus=1, python=forking_python) as cluster:
        assert job_api_answers(cluster.dashboard)
    assert not job_api_answers(cluster.dashboard), "the answer of the proxy is none of a cluster"
    assert os.environ["no_proxy"].split(",") == ["corp.example", "127.0.0.1", "localhost"]
