"""Tests of what a submission carries, and of a submission that is repeated when the cluster has lost its job."""

import sys
from pathlib import Path
from typing import Any

import pytest

from undula.config.environment import OVERRIDES
from undula.config.job import load_spec
from undula.driver.submission import Submission, run_submission, submission_of_job
from undula.telemetry.live import LiveScreen

DASHBOARD = "http://head:8265"


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    file = tmp_path / "job.yaml"
    file.write_text("name: job\nruns: /runs\ndata: {train: /data}\n")
    file.with_suffix(".py").touch()
    overrides = ("config.api_key=hunter2", "plan.seed=3")
    return submission_of_job(file, load_spec(file, overrides), overrides, None, fresh=True)


def test_the_command_line_of_a_driver_shows_no_secret(submission: Submission) -> None:
    assert "hunter2" not in " ".join(submission.arguments)
    assert "plan.seed=3" in submission.arguments
    assert submission.environment == {OVERRIDES: '["config.api_key=hunter2"]'}


def test_a_lost_job_is_submitted_again_and_does_not_start_over(
    submission: Submission, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = type("Details", (), {"status": "SUCCEEDED"})
    followed, submitted = iter([None, None, ended]), []

    def start(api: object, run: str, script: Path, arguments: Any, environment: object) -> str:
        submitted.append("--fresh" in arguments)
        return "job"

    monkeypatch.setattr("undula.driver.submission.job_api_answers", lambda dashboard: True)
    monkeypatch.setattr("undula.driver.submit.connect", lambda dashboard: None)
    monkeypatch.setattr("undula.driver.submit.start", start)
    monkeypatch.setattr("undula.driver.follow.follow_to_the_end", lambda *_, **__: next(followed))
    assert run_submission(submission, DASHBOARD, LiveScreen(sys.stdout), "keep-alive") == 0
    assert submitted == [True, False, False]
    assert "its head was replaced; submitting the job again" in capsys.readouterr().out
