"""Tests of what a job's script leaves behind when it ends early."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from undula import entry
from undula.driver import connection
from undula.elastic.ray import private_environment


@pytest.fixture
def no_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_job_that_is_stopped_before_it_trains_leaves_no_secrets_on_the_head(
    no_handler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connections = []

    @contextmanager
    def connected() -> Iterator[None]:
        yield
        connections.append(os.environ.pop(private_environment.URI))

    def stopped(*_: Any, **more: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setenv(private_environment.URI, "gcs://package.zip")
    monkeypatch.setattr(connection, "connected", connected)
    monkeypatch.setattr(entry, "load_spec", stopped)
    with pytest.raises(SystemExit) as ended:
        entry.main(lambda run: None, argv=["--config", str(tmp_path / "job.yaml")])
    assert ended.value.code == 130
    assert connections == ["gcs://package.zip"]
