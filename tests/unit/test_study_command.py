"""The command line of studies."""

from pathlib import Path

import pytest

from undula.study_command import files_of, with_study_command


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


def test_a_study_in_another_folder_than_its_job_has_it_named_in_full() -> None:
    script, job = Path("/jobs/job.py"), Path("/jobs/job.yaml")
    assert files_of(script, Path("/jobs/study.yaml"), job) == ("study.yaml", "job.yaml")
    assert files_of(script, Path("/studies/study.yaml"), job) == ("/studies/study.yaml", "/jobs/job.yaml")
    assert files_of(script, Path("/jobs/study.yaml"), Path("/other/job.yaml")) == ("study.yaml", "/other/job.yaml")
