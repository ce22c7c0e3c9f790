"""What is said where Horovod cannot be built; that it can is `make horovod`."""

from pathlib import Path

import pytest

from undula.build_horovod import build_horovod, reason_of
from undula.errors import ClusterError


def test_what_is_missing_is_named_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/sh -O2")  # any program that is there
    with pytest.raises(ClusterError, match="needs CMake and make, which this machine lacks"):
        build_horovod(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "Building wheel for horovod: finished with status 'error'\nx.cc:1:10: fatal error: Python.h: No such file\n",
            "fatal error: Python.h: No such file",
        ),
        (
            "CMake Error at CMakeLists.txt:9 (find_package):\n  Could not find NCCL\n\nERROR: Failed building wheel",
            "CMake Error at CMakeLists.txt:9 (find_package): Could not find NCCL",
        ),
        ("ERROR: Could not find a version that satisfies", "ERROR: Could not find a version that satisfies"),
        ("", "no reason given"),
    ],
)
def test_a_failed_builds_reason_is_the_line_that_says_why(said: str, reason: str) -> None:
    assert reason_of(said) == reason
