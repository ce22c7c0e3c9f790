"""Tests of the command line of studies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from undula.config.job import as_tree
from undula.state.events import StartEvent
from undula.state.heartbeat import keep_heartbeat
from undula.state.ledger import LedgerWriter
from undula.storage import Store
from undula.study.records import TRIALS, write_outcome, write_study
from undula.study.spec import StudySpec
from undula.study.submission import names_in_submission
from undula.study.trials import Measurement, Trial, TrialRecord

Command = Callable[..., Any]
"""The fixture `undula`."""


def test_a_file_without_a_command_is_run(undula: Command) -> None:
    for command in (["study"], ["study", "run"]):
        for options in (["none.yaml", "--fresh"], ["--fresh", "none.yaml"], ["none.yaml", "seeds=[1]", "--fresh"]):
            done = undula(*command, *options)
            assert (done.status, done.shown) == (2, "undula: cannot read none.yaml: No such file or directory\n")
    assert "undula study status lr-study-sgd --follow" in undula("study", "--help").out
    assert undula("study").status == 2


def test_a_study_in_another_folder_than_its_job_names_the_job_by_its_full_path() -> None:
    script, job = Path("/jobs/job.py"), Path("/jobs/job.yaml")
    assert names_in_submission(script, Path("/jobs/study.yaml"), job) == ("study.yaml", "job.yaml")
    assert names_in_submission(script, Path("/studies/study.yaml"), job) == ("/studies/study.yaml", "/jobs/job.yaml")
    assert names_in_submission(script, Path("/jobs/study.yaml"), Path("/other/job.yaml")) == (
        "study.yaml",
        "/other/job.yaml",
    )


SPEC = StudySpec("rates", "job.yaml", batches=(10,), base_lrs=(0.1, 0.2), samples=40)
TRIALS_OF_IT = [Trial(10, rate, "none", 0, "own", 0) for rate in SPEC.base_lrs]


@pytest.fixture
def study(tmp_path: Path) -> Store:
    """Study with one finished and one waiting trial."""
    store = Store(str(tmp_path / "rates"))
    write_study(store, {"spec": as_tree(SPEC), "job": {}})
    curve = (Measurement(0, 0, 3.0), Measurement(40, 4, 1.0))
    write_outcome(store / TRIALS / TRIALS_OF_IT[0].name, TrialRecord(TRIALS_OF_IT[0], "complete", 0.1, curve), False)
    return store


def test_status_says_whether_a_study_is_running(study: Store, undula: Command) -> None:
    for options in ((), ("--follow",)):  # the command does not wait for a driver
        done = undula("study", "status", study.url, *options)
        assert done.status == 0
        assert "rates: 1 of 2 trials, not running" in done.shown
        assert "submit the study again to continue it" in done.shown
    store = study / TRIALS / TRIALS_OF_IT[1].name
    ledger = LedgerWriter(store, 1)
    ledger.event(StartEvent(1, 1, step=0))
    ledger.close()
    printed = json.loads(undula("study", "status", study.url, "--json").shown)
    assert (printed["study"], printed["driver_alive"], printed["ended"]) == ("rates", False, False)
    assert [row["state"] for row in printed["trials"]] == ["complete", "waiting"]
    with keep_heartbeat(study):
        printed = json.loads(undula("study", "status", study.url, "--json").shown)
        assert printed["driver_alive"]
        assert [row["state"] for row in printed["trials"]] == ["complete", "running"]
        text = undula("study", "status", study.url).shown
    assert "not running" not in text
    assert "rates: 1 of 2 trials" in text


def test_a_study_is_found_in_the_folder_of_the_runs(
    study: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undula: Command
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert undula("study", "status", "rates").status == 2
    for command, part in (("status", "rates: 1 of 2 trials"), ("report", f"report: {study.url}/report/index.html")):
        done = undula("study", command, "rates", "--runs", tmp_path)
        assert done.status == 0
        assert part in done.shown
    printed = json.loads(undula("study", "report", "rates", "--runs", tmp_path, "--json").shown)
    assert printed["report"] == f"{study.url}/report/index.html"


def test_a_missing_study_is_reported_with_the_searched_folders(undula: Command) -> None:
    done = undula("study", "status", "none-such")
    assert done.status == 2
    assert "there is no study none-such in ~/undula/runs, and no folder none-such here" in done.shown


def test_an_unknown_command_is_refused_with_the_nearest_one(undula: Command) -> None:
    done = undula("study", "statsu", "rates")
    assert done.status == 2
    assert "there is no file statsu, and no such command of `undula study`: did you mean status?" in done.shown
    assert "give a study's YAML" in undula("study", "nonsense").shown
