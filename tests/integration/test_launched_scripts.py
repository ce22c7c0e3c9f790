"""Tests of scripts that real launchers start: one process trains, and the launcher neither starts it again nor shows a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest
from night import at_night

ACCELERATE = Path(__file__).parents[1] / "migration" / "accelerate_after.py"
SCRIPT = """
import torch
import undula

def train(run):
    run.dataset([torch.tensor([float(number)]) for number in range(8)])
    model = run.model(torch.nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(batch).square().mean())
        step.update()

undula.main(train)
"""


def launch(command: list[str], script: Path, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    copy = folder / "job.py"
    copy.write_text(script.read_text() if script.exists() else SCRIPT)
    copy.with_suffix(".yaml").write_text(f"name: job\nruns: {folder}/runs\nplan: {{virtual_workers: 2}}\n")
    command = [sys.executable, "-m", *command, str(copy), "--in-process", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("module", ["run", *at_night(["launch"])])
def test_torchrun(tmp_path: Path, module: str) -> None:
    torchrun = [f"torch.distributed.{module}", "--standalone", "--nproc-per-node=3", "--max-restarts=2"]
    done = launch(torchrun, Path("none"), tmp_path, "schedule.base_lr=0.001", "plan.global_batch=4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished: ") == 1
    assert done.stderr.count("undula: torchrun has started 3 processes") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_accelerate(tmp_path: Path) -> None:
    command = ["accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2"]
    arguments = f"config.arguments=--output_dir {tmp_path / 'out'} --epochs 1"
    (tmp_path / "out").mkdir()
    done = launch(command, ACCELERATE, tmp_path, arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished: ") == 1
    assert done.stderr.count("undula: accelerate launch has started 2 processes") == 1
    assert "Traceback" not in done.stderr
