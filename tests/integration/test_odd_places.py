"""Test of a local cluster where little is as usual: a long folder for temporary files, names of standard modules, and a proxy."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from undula.cluster.local import MOST_BASE, cluster_at_hand, job_api_answers, local_cluster


@pytest.fixture
def odd_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a working directory and an environment in which Ray alone would not start."""
    for module in ("string", "attr", "types"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('this is not the module that was meant')")
    monkeypatch.chdir(tmp_path)
    (long := tmp_path / ("long" * MOST_BASE)).mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "corp.example")
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    yield
    tempfile.tempdir = None


@pytest.mark.usefixtures("odd_place")
def test_a_local_cluster_starts_in_an_odd_place(forking_python: str) -> None:
    with local_cluster(num_cpus=1, python=forking_python) as cluster:
        assert job_api_answers(cluster.dashboard)
    assert cluster_at_hand() is None or job_api_answers(str(cluster_at_hand()))
    assert os.environ["no_proxy"].split(",") == ["corp.example", "127.0.0.1", "localhost"]
