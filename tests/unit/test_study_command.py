"""The command line of studies."""

import pytest

from undula.study_command import with_study_command


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("study a.yaml --fresh", "study run a.yaml --fresh"),
        ("study run a.yaml", "study run a.yaml"),
        ("study status a", "study status a"),
        ("study --help", "study --help"),
        ("study", "study"),
        ("run study.yaml", "run study.yaml"),
        ("", ""),
    ],
)
def test_a_file_alone_is_run(given: str, meant: str) -> None:
    assert with_study_command(given.split()) == meant.split()
