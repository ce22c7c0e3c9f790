"""Tests of scripts that workers execute as files: what stands at the top level holds everywhere, and where files are read and written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from undula.cluster.local import LocalCluster
from undula.state.ledger import read_ledger
from undula.storage import open_store

HELPER = """
CALLS = []
SCALE = 1.0
"""
SCRIPT = """
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import helper
import torch
import torch.nn.functional as F
import undula
from torch import nn

logging.basicConfig(format="the script says: %(message)s", level=logging.INFO)
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("medium")
torch.backends.cudnn.benchmark = True
os.environ["MY_SETTING"] = "42"
F.gelu = F.relu
MODELS = {}
executions = []


def register(make):
    MODELS[make.__name__] = make
    return make


@register
def net():
    return nn.Linear(4, 1)


@dataclass
class Batch:
    x: torch.Tensor

    def to(self, device, **more):
        return Batch(self.x.to(device))


class Pair(NamedTuple):
    rank: int
    steps: int


@dataclass(frozen=True)
class Settings:
    folder: str


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((4,), index / 400.0)


def collate(rows):
    return Batch(torch.stack(rows))


def train(run):
    assert isinstance(run.config, Settings), type(run.config)
    helper.CALLS.append(1)
    executions.append(1)
    facts = {
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "setting": os.environ["MY_SETTING"],
        "patched": F.gelu is F.relu,
        "argv": sys.argv[0].endswith("job.py"),
        "executions": (len(executions), len(helper.CALLS)),
    }
    folder = Path(run.config.folder)
    run.dataset(Rows(), collate_fn=collate, num_workers=1)
    model = run.model(MODELS["net"]())
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    if run.rank == 0 and run.plan.total_steps:
        with (folder / "facts").open("a") as file:
            print(sorted((key, str(value)) for key, value in facts.items()), file=file)
    for step in run.steps():
        for batch in step.batches():
            assert isinstance(batch, Batch)
            step.backward(model(batch.x).square().mean() * helper.SCALE)
        step.update()
        logging.info("step %d is done", step.index)
        pairs = run.gather(Pair(run.rank, step.index))
        assert all(isinstance(pair, Pair) for pair in pairs), pairs
        if step.index == 3 and run.rank == run.world_size - 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            signal.raise_signal(signal.SIGKILL)
    if run.rank == 0:
        torch.save(model.state_dict(), folder / "model.pt")


undula.main(train, Settings)
"""
JOB = """
name: job
runs: {folder}/runs
plan: {{global_batch: 40, virtual_workers: 2}}
schedule: {{base_lr: 0.05}}
checkpoint: {{every_steps: 2}}
workers: {{min: 1, max: 2}}
config: {{folder: {folder}}}
"""


def run_script(cluster: LocalCluster, folder: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    """Run the script in a folder of its own as `python job.py`, from another working directory."""
    folder.mkdir()
    (folder / "job.py").write_text(SCRIPT)
    (folder / "helper.py").write_text(HELPER)
    (folder / "job.yaml").write_text(JOB.format(folder=folder))
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address}
    command = [cluster.python, str(folder / "job.py"), *overrides]
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=300)


def test_the_top_level_of_a_script_holds_in_every_worker_and_group(cluster: LocalCluster, tmp_path: Path) -> None:
    done = run_script(cluster, tmp_path / "two", "workers.min=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "two" / "killed").exists()
    assert {index for index in range(10) if f"the script says: step {index} is done" in done.stdout} == set(range(10))
    first, *others = (tmp_path / "two" / "facts").read_text().splitlines()
    assert first == str(
        [
            ("argv", "True"),
            ("benchmark", "True"),
            ("dtype", "torch.float64"),
            ("executions", "(1, 1)"),
            ("patched", "True"),
            ("precision", "medium"),
            ("setting", "42"),
        ]
    )
    assert others
    assert set(others) == {first}  # variables of the script and of modules beside it start anew in each group
    alone = run_script(cluster, tmp_path / "one", "workers.max=1")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    weights = [torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("two", "one")]
    assert weights[0]["weight"].dtype == torch.float64
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-12)


FILES = """
import os
import signal
from pathlib import Path

import torch
import undula


def train(run):
    if run.rank == 0:
        print("hash in a worker:", hash("words"))
    scale = float(Path("inputs/scale.txt").read_text())
    run.dataset(torch.utils.data.TensorDataset(torch.ones(48, 2)))
    model = run.model(torch.nn.Linear(2, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    for step in run.steps():
        for (x,) in step.batches():
            step.backward(model(x * scale).square().mean())
        step.update()
        if run.rank == 0 and step.index == 7 and not Path(run.url, "killed").exists():
            Path(run.url, "killed").touch()
            signal.raise_signal(signal.SIGKILL)
        if run.rank == 0:
            with open("log.txt", "a") as file:
                print(step.index, file=file)
    if run.rank == 0:
        os.makedirs("outputs", exist_ok=True)
        torch.save(model.state_dict(), "outputs/model.pt")
        (Path(__file__).parent / "beside.txt").write_text("beside the script")


if __name__ == "__main__":
    print("hash in the driver:", hash("words"), flush=True)
    undula.main(train)
"""
FILES_JOB = """
name: files
runs: {runs}
plan: {{global_batch: 4, virtual_workers: 2}}
schedule: {{base_lr: 0.05}}
checkpoint: {{every_steps: 5}}
workers: {{min: 2, max: 2}}
"""


def job_with_files(folder: Path, runs: Path) -> None:
    (folder / "inputs").mkdir(parents=True)
    (folder / "inputs" / "scale.txt").write_text("0.5")
    (folder / "job.py").write_text(FILES)
    (folder / "job.yaml").write_text(FILES_JOB.format(runs=runs))


@pytest.mark.nightly
def test_a_script_reads_and_writes_in_its_own_folder(cluster: LocalCluster, tmp_path: Path) -> None:
    job_with_files(tmp_path / "mine", tmp_path / "runs")
    undula = str(Path(sys.executable).parent / "undula")
    command = [undula, "run", "mine/job.yaml", "--address", cluster.dashboard]
    env = {**os.environ, **cluster.env}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "mine" / "outputs" / "model.pt").exists()
    assert (
        len(set(re.findall(r"hash in .*: (-?\d+)", done.stdout))) == 1
    )  # the order of a set is the same in all processes
    assert (tmp_path / "mine" / "beside.txt").exists()
    assert len((tmp_path / "mine" / "log.txt").read_text().split()) >= 11
    assert not (tmp_path / "runs" / "files" / "files").exists()


@pytest.mark.nightly
def test_files_of_a_script_that_exists_only_as_a_copy_reach_the_run(cluster: LocalCluster, tmp_path: Path) -> None:
    job_with_files(tmp_path / "gone", tmp_path / "runs")
    ray = str(Path(sys.executable).parent / "ray")
    command = [ray, "job", "submit", "--address", cluster.dashboard, "--working-dir", str(tmp_path / "gone"), "--"]
    env = {**os.environ, **cluster.env}
    done = subprocess.run(
        [*command, "python", "job.py"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files = tmp_path / "runs" / "files" / "files"
    assert f"files that the script wrote: {files}" in done.stdout
    # A process that is killed while it writes leaves a part.
    names = {str(file.relative_to(files)) for file in files.rglob("*") if file.is_file() and file.suffix != ".partial"}
    assert names == {"log.txt", "outputs/model.pt", "beside.txt"}
    # The process that took the place of the lost one has continued the file of the last checkpoint.
    steps = [int(line) for line in (files / "log.txt").read_text().split()]
    assert steps[:5] == [0, 1, 2, 3, 4]
    assert steps[-1] == 11
    assert not (tmp_path / "gone" / "log.txt").exists()


ELSEWHERE = """
import os
from pathlib import Path

import extra
import ours
import torch
import undula


def train(run):
    print("worker", ours.__name__, extra.__name__, os.environ["MODE"], os.environ["DB_PASSWORD"], Path("sent.txt").read_text())
    run.dataset(torch.utils.data.TensorDataset(torch.ones(48, 2)))
    model = run.model(torch.nn.Linear(2, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    for step in run.steps():
        Path("data/scale.txt").read_text()


print("driver", ours.__name__, extra.__name__, os.environ["MODE"], os.environ["DB_PASSWORD"])
undula.main(train)
"""


def test_a_job_on_other_machines_has_packages_and_variables_and_names_files_that_were_not_sent(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    files = {
        "jobs/.gitignore": "data\n",
        "jobs/data/scale.txt": "0.5",
        "jobs/sent.txt": "sent",
        "jobs/job.py": ELSEWHERE,
        "jobs/job.yaml": FILES_JOB.format(runs=tmp_path / "runs"),
        "lib/ours.py": "",
        "more/extra/__init__.py": "",
        "env.yaml": f"py_modules: [{tmp_path}/more/extra]\nenv_vars: {{MODE: fast, DB_PASSWORD: hunter2x, PYTHONPATH: /mine}}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    undula = str(Path(sys.executable).parent / "undula")
    command = [undula, "run", "jobs/job.yaml", "--address", cluster.dashboard, "--project", "lib"]
    # Without this variable, the job would work in the folder from which it was submitted, which this machine has.
    elsewhere = ["--env", "UNDULA_FOLDER=/none", "--runtime-env", "env.yaml"]
    env = {**os.environ, **cluster.env}
    done = subprocess.run([*command, *elsewhere], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "because .gitignore names it: data (RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 sends all but" in done.stdout
    assert "driver ours extra fast ***\n" in done.stdout
    assert "worker ours extra fast *** sent\n" in done.stdout
    note = ".gitignore names data, so it was not sent to the cluster; see 'Packages and files' in docs/jobs.md"
    assert f"\n{note}\n" in done.stdout
    events = read_ledger(open_store(str(tmp_path / "runs" / "files"))).events["message"].to_pylist()
    assert f"'data/scale.txt' at job.py:17 ({note})" in " ".join(events)
