"""Tests of the package in docs/extending.md, which adds to the library from outside."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from outside import installed_files

from undula.state.commit import find_commits
from undula.state.ledger import read_ledger
from undula.storage import open_store

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import undula

def train(run):
    run.dataset(TensorDataset(torch.randn(48, 4), torch.randn(48, 1)))
    model = run.model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
    for step in run.steps():
        for x, y in step.batches():
            step.backward((model(x) - y).square().mean())
        step.update()

if __name__ == "__main__":
    undula.main(train)
"""
JOB = "name: job\nplan: {global_batch: 12, virtual_workers: 3}\nworkers: {min: 2, max: 2}\nconfig: {team: vision, average_decay: 0.9}\n"


class Outside:
    """Commands of the library with the package of the page.

    Args:
        folder: Folder of the package, of a job and of its runs.
    """

    def __init__(self, folder: Path):
        text = PAGE.read_text()
        files = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL))
        project = tomllib.loads(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0])["project"]
        self.folder, self.num_lines = folder, {Path(path).stem: text.count("\n") for path, text in files.items()}
        self.env = installed_files(folder / "site", "my_package", files, project["entry-points"])
        (folder / "job.py").write_text(SCRIPT)
        (folder / "job.yaml").write_text(JOB + f"runs: {folder}/runs\n")

    def undula(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "undula.cli", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=300, check=False
        )


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    return Outside(tmp_path_factory.mktemp("outside"))


def test_an_engine_of_another_package_has_the_bits_of_the_librarys_own(outside: Outside) -> None:
    """Two workers have two and one virtual workers, so that they send different numbers of roots. The library has one worker."""
    assert sum(outside.num_lines[name] for name in ("engine", "log_file", "clusters", "commands", "checks")) <= 150
    for name, engine, *options in (("theirs", "gathering"), ("ours", "torch", "--in-process")):
        done = outside.undula("run", "job.yaml", f"name={name}", f"engine={engine}", *options)
        assert done.returncode == 0, done.stdout + done.stderr
    same = outside.undula("verify", "runs/theirs", "--against", "runs/ours")
    assert same.returncode == 0, same.stdout
    assert "average.0.weight" in find_commits(open_store(f"{outside.folder}/runs/theirs"))[0][0].tensors
    assert outside.undula("lost-steps", "runs/theirs").stdout == "0\n"


def test_a_check_of_another_package_refuses_a_job_before_a_worker_starts(outside: Outside) -> None:
    done = outside.undula("run", "job.yaml", "name=nobodys", "config.team=null")
    assert done.returncode == 2
    assert "undula: config.team is missing; set it to the team that pays for the run\n" in done.stdout + done.stderr
    assert not (outside.folder / "runs" / "nobodys" / "ledger").exists()


def test_a_source_of_notices_of_another_package_is_found_by_its_name(outside: Outside) -> None:
    code = "from undula.cluster.notices import source_named; print(source_named('maintenance').poll())"
    done = subprocess.run([sys.executable, "-c", code], env=outside.env, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    wrong = outside.undula("spot", "watch", "--source", "moon")
    assert wrong.returncode == 2
    assert "set it to one of aws, gcp, azure, maintenance or file:PATH" in wrong.stderr


def test_a_launcher_and_a_tracker_of_another_package_run_and_show_a_job(outside: Outside) -> None:
    shown = outside.folder / "losses"
    settings = ("plan.max_steps=3", "workers.min=1", "workers.max=1", f"trackers.log_file.path={shown}")
    done = outside.undula("run", "job.yaml", "name=launched", *settings, "--launcher", "small")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line.split() for line in shown.read_text().splitlines()]
    assert [int(step) for step, _ in steps] == [1, 2, 3]
    losses = read_ledger(open_store(f"{outside.folder}/runs/launched")).steps["loss"].to_pylist()
    assert [float(loss) for _, loss in steps] == losses
    wrong = outside.undula("run", "job.yaml", "--launcher", "big")
    assert wrong.returncode == 2
    assert "--launcher is 'big', and the installed launchers are: small; correct the name, or install" in wrong.stderr
    both = outside.undula("run", "job.yaml", "--launcher", "small", "--detach")
    assert "--launcher cannot be combined with --detach; remove one of them" in both.stderr


def test_an_engine_that_no_package_has_is_refused_with_those_that_exist(outside: Outside) -> None:
    done = outside.undula("run", "job.yaml", "name=none", "engine=nccl")
    assert done.returncode == 2
    assert "'torch', 'horovod' or 'gathering'" in done.stderr
