"""Tests of the interpreter whose workers are forks: where it cannot run, workers import the libraries themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

from undula.driver import local_job
from undula.driver.local_job import _working_interpreter


def test_it_runs_what_python_runs(tmp_path: Path) -> None:
    python = _working_interpreter(tmp_path)
    assert python is not None
    done = subprocess.run([python, "-c", "print(6 * 7)"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "42\n"


def test_a_python_outside_of_a_virtual_environment_starts_no_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = local_job.write_interpreter
    monkeypatch.setattr(local_job, "write_interpreter", lambda folder: write(folder, "/usr/bin/python3"))
    assert _working_interpreter(tmp_path) is None


def test_a_python_whose_path_has_a_space_starts_no_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my envs").symlink_to(Path(sys.executable).parents[1])
    write = local_job.write_interpreter
    monkeypatch.setattr(
        local_job, "write_interpreter", lambda folder: write(folder, str(tmp_path / "my envs" / "bin" / "python"))
    )
    (tmp_path / "new").mkdir()
    assert _working_interpreter(tmp_path / "new") is None
