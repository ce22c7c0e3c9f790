"""A run or a study is found by its path or by its name, and a folder that only has the name does not hide it."""

from pathlib import Path

import pytest

from undula.errors import RunError
from undula.state.defaults import DEFAULT_RUNS
from undula.state.locate import locate_run, locate_study
from undula.storage import Store


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, and beside it a working directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def write(folder: Path, file: str = "job.json") -> Store:
    store = Store(str(folder))
    store.write(file, b"{}")
    return store


def test_a_name_is_looked_up_here_and_then_in_the_default_folder(home: Path) -> None:
    default = write(Path(DEFAULT_RUNS).expanduser() / "rates")
    assert locate_run("rates") == default
    (home / "here" / "rates").mkdir()
    assert locate_run("rates") == default, "an empty folder is no run"
    write(home / "here" / "rates")
    assert locate_run("rates").url == "rates"


def test_a_name_is_looked_up_in_the_folder_that_is_given_before_any_other(home: Path) -> None:
    write(home / "here" / "rates")
    elsewhere = write(home / "elsewhere" / "rates")
    assert locate_run("rates", f"{home}/elsewhere") == elsewhere
    assert locate_run("rates", f"{home}/elsewhere/") == elsewhere
    assert locate_run("rates", f"{home}/nowhere").url == "rates"
    trial = write(home / "elsewhere" / "study" / "trials" / "one")
    assert locate_run("study/trials/one", f"{home}/elsewhere") == trial


def test_a_study_s_directory_is_one_with_a_study(home: Path) -> None:
    write(home / "here" / "rates")
    study = write(home / "elsewhere" / "rates", "study.json")
    assert locate_study("rates", f"{home}/elsewhere") == study
    write(home / "here" / "rates", "study.json")
    assert locate_study("rates").url == "rates"


def test_a_path_is_taken_as_it_is(home: Path) -> None:
    assert locate_run(f"{home}/none").url == f"{home}/none"
    assert locate_run("~/none").url == f"{home}/home/none"


def test_where_a_run_was_looked_for_is_named(home: Path) -> None:
    with pytest.raises(RunError, match=f"there is no run none in {home}/runs, and no folder none here: .* with --runs"):
        locate_run("none", f"{home}/runs")
    with pytest.raises(RunError, match="there is no study none in ~/undula/runs"):
        locate_study("none")
