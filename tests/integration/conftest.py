"""A real Ray cluster for the session, and a small text data set."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration_kit import CONTEXT, Jobs

from undula.cluster.local import LocalCluster, local_cluster
from undula.data.corpora import stdlib_text


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(num_cpus=4) as running:
        yield running


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a corpus of a few standard-library files: several shards of several row groups."""
    source = tmp_path_factory.mktemp("source")
    library = Path(os.__file__).parent
    for name in (
        "argparse",
        "ast",
        "base64",
        "calendar",
        "codecs",
        "copy",
        "csv",
        "datetime",
        "difflib",
        "doctest",
        "enum",
        "ftplib",
        "inspect",
        "locale",
        "mailbox",
        "optparse",
        "os",
        "pdb",
        "pickle",
        "platform",
        "pydoc",
        "random",
    ):
        (source / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    out = str(tmp_path_factory.mktemp("text"))
    stdlib_text(context=CONTEXT, root=source).write(out, num_shards=3, row_group_bytes=16 * 1024)
    return out


@pytest.fixture
def jobs(cluster: LocalCluster, text: str, tmp_path: Path) -> Jobs:
    return Jobs(cluster, text, str(tmp_path / "runs"))


@pytest.fixture(scope="session")
def session_jobs(cluster: LocalCluster, text: str, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(cluster, text, str(tmp_path_factory.mktemp("session-runs")))
