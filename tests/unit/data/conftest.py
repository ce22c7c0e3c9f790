"""Places for the data sets of the tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import S3Proxy, serving

from undula.storage import Store, open_store
from undula.storage.s3 import forget_clients


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Empty folder, on a disk and on S3."""
    return open_store(request.getfixturevalue("s3").url("data") if request.param == "s3" else str(tmp_path / "data"))


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    """Empty folder on a disk."""
    return open_store(str(tmp_path / "data"))


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> Store:
    """Empty folder on S3."""
    return open_store(request.getfixturevalue("s3").url("data"))


@pytest.fixture
def proxy(s3_endpoint: str, bucket: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """Proxy in front of the S3 server, which the requests of this process pass."""
    with serving(S3Proxy(s3_endpoint)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        forget_clients()
        yield server
