"""Tests that the core works without its satellites."""

import subprocess
import sys
from pathlib import Path

import pytest
from rings import SATELLITES
from small_text import write_text

from undula.report.data.run_record import read_run
from undula.storage import open_store

ROOT = Path(__file__).parents[2]
TRAIN = """
import sys
import torch
import undula

def train(run):
    model = run.model(torch.nn.Linear(4, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(torch.ones(len(batch["text"]), 4)).square().mean())
        step.update()

sys.argv = ["train.py", "--config", JOB, "--in-process"]
undula.main(train)
"""
COMMAND = "from undula.cli.main import main; main(ARGUMENTS)"


def without(satellites: str, code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "tests" / "without.py"), satellites, code]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    "satellites",
    [",".join(SATELLITES), *(pytest.param(each, marks=pytest.mark.nightly) for each in SATELLITES)],
)
def test_a_job_trains_without_satellites(satellites: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    url = write_text(tmp_path / "text")
    job = tmp_path / "train.yaml"
    job.write_text(
        f"name: run\nruns: {tmp_path}\ndata: {{train: {url}/train}}\n"
        "plan: {global_batch: 8, virtual_workers: 2, max_steps: 5}\nschedule: {base_lr: 0.1}\n"
    )
    done = without(satellites, TRAIN.replace("JOB", repr(str(job))))
    assert done.returncode == 0, done.stderr
    assert read_run(open_store(f"{tmp_path}/run")).ledger.steps.num_rows == 5


@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        (["--help"], 0, "Prove from its ledger that a run followed its plan."),
        (
            ["study", "x.yaml"],
            2,
            "undula: 'study' needs undula.cli.study, which this installation of Undula was made without",
        ),
    ],
)
def test_commands_of_satellites_say_that_these_are_missing(arguments: list[str], status: int, shown: str) -> None:
    done = without(",".join(SATELLITES), COMMAND.replace("ARGUMENTS", repr(arguments)))
    assert done.returncode == status, done.stderr
    assert shown in done.stdout + done.stderr
    assert "  study " not in done.stdout
