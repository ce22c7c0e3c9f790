"""Tests that a run or study is found by its path or name, even if another folder has the same name."""

from pathlib import Path

import pytest

from undula.errors import RunError
from undula.state.defaults import DEFAULT_RUNS
from undula.state.locate import locate_run, locate_study
from undula.storage import Store
from undula.storage.s3 import forget_clients


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home directory next to a working directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def write(folder: Path, file: str = "job.json") -> Store:
    store = Store(str(folder))
    store.write(file, b"{}")
    return store


def test_a_name_is_looked_up_in_the_working_directory_and_then_in_the_default_folder(home: Path) -> None:
    default = write(Path(DEFAULT_RUNS).expanduser() / "rates")
    assert locate_run("rates") == default
    (home / "here" / "rates").mkdir()
    assert locate_run("rates") == default, "an empty folder is no run"
    write(home / "here" / "rates")
    assert locate_run("rates").url == "rates"


def test_a_name_is_looked_up_in_the_given_folder_first(home: Path) -> None:
    write(home / "here" / "rates")
    elsewhere = write(home / "elsewhere" / "rates")
    assert locate_run("rates", f"{home}/elsewhere") == elsewhere
    assert locate_run("rates", f"{home}/elsewhere/") == elsewhere
    assert locate_run("rates", f"{home}/nowhere").url == "rates"
    trial = write(home / "elsewhere" / "study" / "trials" / "one")
    assert locate_run("study/trials/one", f"{home}/elsewhere") == trial


def test_the_directory_of_a_study_has_a_study(home: Path) -> None:
    write(home / "here" / "rates")
    study = write(home / "elsewhere" / "rates", "study.json")
    assert locate_study("rates", f"{home}/elsewhere") == study
    write(home / "here" / "rates", "study.json")
    assert locate_study("rates").url == "rates"


def test_a_path_or_url_is_used_unchanged(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_run(f"{home}/none").url == f"{home}/none"
    assert locate_run("~/none").url == f"{home}/home/none"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    forget_clients()
    assert locate_run("s3://bucket/runs/rates").url == "s3://bucket/runs/rates"
    assert locate_study("s3://bucket/runs/rates", "s3://bucket/other").url == "s3://bucket/runs/rates"


def test_the_searched_folders_are_named(home: Path) -> None:
    with pytest.raises(RunError, match=f"there is no run none in {home}/runs, and no folder none here; .* with --runs"):
        locate_run("none", f"{home}/runs")
    with pytest.raises(RunError, match="there is no study none in ~/undula/runs"):
        locate_study("none")
