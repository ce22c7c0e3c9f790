"""A real Ray cluster for the session, and a small text data set."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from integration_kit import Jobs
from small_text import write_text

from undula.cluster.local import LocalCluster, local_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(num_cpus=4) as running:
        yield running


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a small corpus."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def jobs(cluster: LocalCluster, text: str, tmp_path: Path) -> Jobs:
    return Jobs(cluster, text, str(tmp_path / "runs"))


@pytest.fixture(scope="session")
def session_jobs(cluster: LocalCluster, text: str, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(cluster, text, str(tmp_path_factory.mktemp("session-runs")))
