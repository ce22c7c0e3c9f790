"""Tests of what a submission carries, and of a submission that is repeated when the cluster has lost its job."""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from undula.config.environment import OVERRIDES, PLACE
from undula.config.job import load_spec
from undula.driver.submission import Submission, run_submission, submission_of_job
from undula.errors import ClusterError, SpecError
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
    assert submission.arguments[3:5] == (PLACE, "plan.seed=3")
    assert submission.environment == {OVERRIDES: '["config.api_key=hunter2"]'}


def test_a_lost_job_is_submitted_again_and_does_not_start_over(
    submission: Submission, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = type("Details", (), {"status": "SUCCEEDED"})
    followed, submitted, ids = iter([None, None, ended]), [], set()
    answers = iter([None, ClusterError("the answer was lost"), None, None])

    def start(api: object, job: str, run: str, script: Path, arguments: Any, *_: object) -> None:
        submitted.append("--fresh" in arguments)
        ids.add(job)
        if error := next(answers):
            raise error

    monkeypatch.setattr("undula.driver.submission.AWAIT_CLUSTER_S", 0.0)
    monkeypatch.setattr("undula.driver.submission.job_api_answers", lambda dashboard: True)
    monkeypatch.setattr("undula.driver.submit.connect", lambda dashboard: None)
    monkeypatch.setattr("undula.driver.submit.start", start)
    monkeypatch.setattr("undula.driver.follow.follow_to_the_end", lambda *_, **__: next(followed))
    assert run_submission(submission, DASHBOARD, LiveScreen(sys.stdout), "keep-alive") == 0
    assert submitted == [True, False, False, False]
    assert len(ids) == 3, "only the submission whose answer was lost has the id of another one"
    assert "its head was replaced; submitting the job again" in capsys.readouterr().out


def test_a_tracker_without_credentials_is_refused_before_a_cluster_starts(
    submission: Submission, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_on_own_cluster(*_: object) -> int:
        started.append("WANDB_API_KEY" in os.environ)
        return 0

    started: list[bool] = []
    file = tmp_path / "job.yaml"
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    monkeypatch.setattr("undula.driver.submission.cluster_at_hand", lambda: None)
    monkeypatch.setattr("undula.driver.submission.run_on_own_cluster", run_on_own_cluster)
    file.write_text("name: job\n")  # the script gives the data, so that nothing else is refused
    overrides = ("trackers.wandb={}", f"runs={tmp_path}", "workers.max=1")
    tracked = submission_of_job(file, load_spec(file, overrides), overrides, None, fresh=False)
    with pytest.raises(
        SpecError, match=r"^command line: trackers\.wandb: mode is online, but the job has no key for W&B"
    ):
        run_submission(tracked, None, LiveScreen(sys.stdout), "follow")
    assert not started
    with_key = tracked.with_environment({"WANDB_API_KEY": "k"})
    assert run_submission(with_key, None, LiveScreen(sys.stdout), "follow") == 0
    assert started == [False], "the cluster must not inherit a secret of the job"


@pytest.mark.parametrize(("runs", "run"), [("/runs", "job"), ("/home/me/runs", "/runs/job")])
def test_the_hints_of_a_job_that_is_left_alone_name_its_run(
    runs: str, run: str, submission: Submission, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNDULA_RUNS", runs)
    monkeypatch.setattr("undula.driver.submit.connect", lambda dashboard: None)
    monkeypatch.setattr("undula.driver.submit.start", lambda *_: None)
    assert run_submission(submission, DASHBOARD, LiveScreen(sys.stdout), "detach") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"undula logs {run} --follow --address {DASHBOARD}",
        f"undula stop {run} --address {DASHBOARD}",
    ]


def test_the_driver_has_a_yaml_that_is_not_in_the_folder_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "src").mkdir()
    file, script = tmp_path / "configs" / "job.yaml", tmp_path / "src" / "train.py"
    script.write_text("")
    file.write_text("{name: elsewhere, data: {train: tokens}, plan: {global_batch: 8}}")
    submission = submission_of_job(file, load_spec(file), (), script, fresh=False)
    file.unlink()  # as on a cluster, which gets the folder of the script
    for name, value in submission.environment.items():
        monkeypatch.setenv(name, value)
    there = load_spec(Path(submission.arguments[1]))
    assert (there.spec.plan.global_batch, there.origin("plan.global_batch")) == (8, f"{file}:1")


def test_a_yaml_beside_the_script_is_not_sent_twice(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("{name: beside, data: {train: tokens}, plan: {global_batch: 8}}")
    (tmp_path / "job.py").write_text("")
    submission = submission_of_job(tmp_path / "job.yaml", load_spec(tmp_path / "job.yaml"), (), None, fresh=False)
    assert submission.environment == {}
    assert submission.arguments[1] == "job.yaml"
