"""Fixtures for all tests: a local S3 server, so that no test needs the network, and a Ray cluster for the session."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads would wait actively for cores that other tests have

# isort: split
import own_memory

# isort: split
import gc
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
from hypothesis import settings
from jobs_kit import Jobs
from s3_server import client_env, moto_server
from small_text import write_text

from undula.cluster.local import LocalCluster
from undula.masking import values as masks
from undula.storage.s3 import forget_clients
from undula.storage.s3_requests import forget_forms

pytest_plugins = ["shared_clusters", "browser_kit"]
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise, hundreds of processes would compile the same modules
settings.register_profile("undula", deadline=None)  # a test on a busy machine must not fail for being slow
settings.load_profile("undula")

SHARED = ("spot", "cluster")
"""Fixtures of clusters that tests share, those with the longest tests first."""


LONG = (
    *("test_conformance.py", "test_submit.py", "test_doctor_live.py", "test_autoscaler.py"),
    *("test_features.py", "test_drawn_changes.py"),
)
"""Slowest of the other test files."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a cluster run in one process, one after another; the other files run beside them, each in one process.

    The longest come first, because one process would be idle if the other ran them last.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_cluster_of(item) or str(item.path)))
    first = (*SHARED, None)
    items.sort(key=lambda item: (first.index(_cluster_of(item)), item.path.name not in LONG))


def _cluster_of(item: pytest.Item) -> str | None:
    """Return the fixture of the cluster that a test shares, if it does."""
    return next((name for name in SHARED if name in getattr(item, "fixturenames", ())), None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check that xdist knows the groups: it ignores them with some versions of pytest, and every process then starts every cluster."""
    if getattr(session.config.option, "loadgroup", False):
        assert all("@" in item.nodeid for item in session.items)
    gc.collect()
    gc.freeze()  # a collection that looks through all imported modules takes 0.4 s


@pytest.fixture(autouse=True)
def no_snapshots_of_the_last_test() -> Iterator[None]:
    yield
    own_memory.delete_snapshots()


@pytest.fixture(autouse=True)
def no_secrets_of_the_last_test() -> Iterator[None]:
    yield
    os.environ.pop(masks.NAMES, None)
    masks._variables, masks._values, masks._pattern = {}, frozenset(), None


@dataclass(frozen=True)
class S3:
    """Empty bucket and the environment variables with which clients find it."""

    bucket: str
    env: dict[str, str]

    def url(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of an S3 server that all tests share."""
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_env(s3_endpoint: str) -> dict[str, str]:
    """Environment variables with which clients find the S3 server."""
    return client_env(s3_endpoint)


@pytest.fixture
def s3(s3_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """New bucket, to which the environment of this process points during the test."""
    env = s3_env
    for name in [name for name in os.environ if name.startswith("AWS_") and name != "AWS_CA_BUNDLE"]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    _forget_server()
    bucket = f"undula-{uuid.uuid4().hex}"
    boto3.client("s3", region_name=env["AWS_REGION"]).create_bucket(Bucket=bucket)
    yield S3(bucket, env)
    _forget_server()


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


def _forget_server() -> None:
    """Forget what this process knows about the server: its clients are bound to one endpoint."""
    forget_clients()
    forget_forms()
