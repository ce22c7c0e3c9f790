"""Tests that a job which cannot train, or need not, is refused before a cluster starts for it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from numbers_job import write_numbers

from undula.config.job import load_spec
from undula.driver.submission import run_submission, submission_of_job
from undula.errors import ManifestError, RunError
from undula.state.directory import held
from undula.storage import open_store
from undula.telemetry.live import LiveScreen

SCRIPT = """
import torch
import undula

def train(run):
    model = run.model(torch.nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(batch["x"][:, None].float()).mean())
        step.update()

undula.main(train)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """YAML of a job of four steps, beside its script."""
    write_numbers(tmp_path, 48)
    file = tmp_path / "job.yaml"
    file.with_suffix(".py").write_text(SCRIPT)
    file.write_text(
        f"name: job\nruns: {tmp_path}/runs\ndata: {{train: {tmp_path}/data}}\n"
        "plan: {global_batch: 12, virtual_workers: 2}\nschedule: {base_lr: 0.001}\n"
    )
    return file


@pytest.fixture
def submit(job: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Function that submits the job where there is no cluster, given overrides.

    Its status is 99 if a cluster would start, and 98 if the driver would run without one.
    """
    monkeypatch.setattr("undula.driver.submission.cluster_at_hand", lambda: None)
    monkeypatch.setattr("undula.driver.submission.run_on_own_cluster", lambda *_: 99)
    monkeypatch.setattr("undula.driver.submission.run_in_this_process", lambda *_: 98)

    def submit(*overrides: str, fresh: bool = False) -> int:
        submission = submission_of_job(job, load_spec(job, overrides), overrides, None, fresh)
        return run_submission(submission, None, LiveScreen(sys.stdout), "follow")

    return submit


def test_missing_data_are_named_and_leave_no_run_behind(submit: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"command line: data\.train: there is no folder .*/nowhere"):
        submit(f"data.train={tmp_path}/nowhere")
    assert submit() == 99
    assert not list((tmp_path / "runs").iterdir())


def test_a_run_that_is_finished_changed_or_held_starts_no_cluster(
    submit: Callable[..., int], job: Path, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "undula.cli", "run", str(job), "--in-process", "config.width=1"], check=True)
    assert submit() == 98
    assert submit(fresh=True) == 99
    assert submit("config.width=1.0") == 98, "only the script knows what its settings mean"
    with pytest.raises(
        RunError, match=r"command line: plan\.global_batch is 24, but .* was started with 12; restore it"
    ):
        submit("plan.global_batch=24")
    write_numbers(tmp_path, 40)
    with pytest.raises(RunError, match="was started with other training data"):
        submit()
    with held(open_store(f"{tmp_path}/runs/job")), pytest.raises(RunError, match="another job is training in"):
        submit()
