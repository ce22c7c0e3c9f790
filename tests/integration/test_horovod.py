"""Tests of `engine: horovod`, and of a script for Ray's removed HorovodTrainer, with real Ray and Horovod."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs_kit import ROOT, Finished, Jobs, relative_difference

from undula.cluster.local import LocalCluster
from undula.data.prepare.corpora import digits

TOLERANCE = 1e-5
HOROVOD = pytest.importorskip("horovod", reason="Horovod is not installed: make horovod")


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_losses_are_those_of_the_torch_engine(session_jobs: Jobs, on_one_rank: Finished, world_size: int) -> None:
    """Six virtual workers have one micro-batch each, and an epoch ends during the run."""
    settings = (*session_jobs.past_an_epoch(), "engine=horovod")
    done = session_jobs.run(f"by-horovod-{world_size}", *session_jobs.workers(world_size), *settings)
    assert done.status == 0, done.err
    assert set(done.column("world_size")) == {world_size}
    assert relative_difference(done.column("loss"), on_one_rank.column("loss")) < TOLERANCE


SCRIPT_OF_ONES_OWN = """
import horovod.torch as hvd
import torch
from torch import nn
import undula
from undula.errors import UsageError

def train(run):
    model = run.model(nn.Linear(4, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(batch["text"][:, :4].float()).square().mean() * 1e-6)
        step.update()
        step_of_all = hvd.allgather(torch.tensor([step.index]))
        assert step_of_all.tolist() == [step.index] * hvd.size(), step_of_all
        if step.index == 1:
            print("I am", hvd.rank(), "of", hvd.size(), "and", hvd.local_rank(), "here")
    try:
        run.optimizer(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
    except UsageError as error:
        print("refused:", error)

if __name__ == "__main__":
    undula.main(train)
"""


def own_script(session_jobs: Jobs, folder: Path) -> Jobs:
    script = folder / "own.py"
    script.write_text(SCRIPT_OF_ONES_OWN)
    script.with_suffix(".yaml").write_text(
        "name: own\ndata: {train: x}\nplan: {virtual_workers: 2, global_batch: 8, max_steps: 4}\nengine: horovod\n"
    )
    return Jobs(session_jobs.cluster, session_jobs.text, str(folder), script, ())


def test_horovods_own_functions_work_in_a_script_except_its_optimizer(session_jobs: Jobs, tmp_path: Path) -> None:
    jobs = own_script(session_jobs, tmp_path)
    done = jobs.run("own", "data.validation=null", "horovod.timeline=" + str(tmp_path / "trace.json"), *jobs.workers(2))
    assert done.status == 0, done.err
    assert "I am 0 of 2 and 0 here" in done.out
    assert "I am 1 of 2 and 1 here" in done.out
    assert "refused: run.optimizer() got a DistributedOptimizer of Horovod" in done.out
    (trace,) = tmp_path.glob("trace-*.json")
    assert "alltoall" in trace.read_text().lower()


@pytest.mark.nightly
def test_a_script_of_rays_former_trainer_runs(cluster: LocalCluster, tmp_path: Path) -> None:
    digits().write(str(tmp_path / "digits"))
    script = ROOT / "jobs" / "horovod_trainer.py"
    command = [cluster.python, str(script), f"--data={tmp_path}/digits/train", f"--storage={tmp_path}", "--epochs=2"]
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    assert json.loads(line)["epoch"] == 1
    assert json.loads(line)["loss"] < 2.0


@pytest.mark.nightly
def test_a_missing_horovod_is_reported_with_the_command_that_installs_it(session_jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ModuleNotFoundError('no horovod')")
    _, *script = session_jobs.command("without", "engine=horovod")
    env = {**session_jobs.env(), "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *script]  # the cluster's interpreter has imported the real Horovod
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3
    assert done.stderr.strip() == (
        "undula: engine: horovod needs Horovod, which is not installed here; run `undula build-horovod` to build and install it"
    )
