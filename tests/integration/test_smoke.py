"""Tests of `undula run --smoke`: it goes through all parts of a run, leaves nothing, and names the part that fails with the fix."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from jobs_kit import LANGUAGE_MODEL, Finished, Jobs

from undula.cluster.local import LocalCluster

SCRIPT = """
import signal, time
import torch
from torch.utils.data import TensorDataset
import undula

class Model(torch.nn.Module):
    def __init__(self, is_complex):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        if is_complex:
            self.phase = torch.nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, values):
        return self.linear(values * self.phase.real if hasattr(self, "phase") else values)

def train(run):
    fails = run.config.fails
    data = TensorDataset(torch.arange(512.0).reshape(64, 8) / 512)
    run.dataset(data, validation=None if fails == "weights" else data)
    model = run.model(Model(fails == "export"))
    scale = run.world_size if fails == "rate" else 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale * run.base_lr)
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 9 * run.world_size) if fails == "scheduler" else None
    run.optimizer(optimizer, steps)
    average = [weight.detach().clone() for weight in model.parameters()]

    def validate(batch):
        if fails == "validate":
            raise ValueError("no labels")
        if fails == "average":
            return torch.nn.functional.linear(batch[0], *average).square().mean()
        return model(batch[0]).square().mean()

    for step in run.steps(validate=validate):
        for number, batch in enumerate(step.batches()):
            if fails == "memory":
                signal.raise_signal(signal.SIGKILL)  # as the kernel ends a process if there is no memory left
            if fails == "monitor":
                kept = torch.ones(6 * 2**28)
                time.sleep(60)  # until Ray's memory monitor ends this process
            if fails == "2 workers" and run.world_size == 2:
                raise RuntimeError("only one of us can be right")
            weight = 2.0 if fails == "first batch" and number == 0 else 1.0
            step.backward(weight * model(batch[0]).square().mean())
        step.update()
        if fails == "weights":
            with torch.no_grad():
                model.linear.weight.mul_(1.0 - 0.01 * run.world_size)
        for mean, weight in zip(average, model.parameters()):
            mean.lerp_(weight.detach(), 0.1)
        run.log({"seconds": time.time()})

if __name__ == "__main__":
    undula.main(train)
"""
JOB = """
name: tiny
plan: {global_batch: 8, virtual_workers: 2, epochs: 3}
validation: {every_steps: 4}
checkpoint: {every_steps: 3}
workers: {max: 2}
config: {fails: nothing}
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "tiny.py"
    path.write_text(SCRIPT)
    path.with_suffix(".yaml").write_text(JOB)
    return path


@pytest.fixture
def tiny(cluster: LocalCluster, script: Path, tmp_path: Path) -> "Tiny":
    return Tiny(cluster, "", str(tmp_path / "runs"), script, ())


class Tiny(Jobs):
    """Runner of smoke tests of the script above."""

    def command(self, name: str, *overrides: str) -> list[str]:
        return [self.cluster.python, str(self.script), "--smoke", f"name={name}", f"runs={self.runs}", *overrides]

    @property
    def left(self) -> list[Path]:
        return list(Path(self.runs).glob("*/*")) if Path(self.runs).is_dir() else []


def failure(done: Finished, status: int = 1) -> str:
    """Return the sentence with which a smoke test has failed."""
    assert done.status == status, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("undula: ")]
    assert done.err.splitlines()[-1] == line
    return line.removeprefix("undula: ")


def parts(out: str) -> list[str]:
    """Return the parts that have a line with their seconds, in order."""
    return re.findall(r"^  (\S.*?) +\d+\.\d s  ", out, re.MULTILINE)


def test_every_part_is_tried_and_the_run_itself_stays_as_it_was(tiny: Tiny) -> None:
    run = Path(tiny.runs) / "tiny" / "job.json"
    run.parent.mkdir(parents=True)
    run.write_text("{}")
    done = tiny.run("tiny")
    assert done.status == 0, done.err
    expected = ["check", "start", "validate", "read", "step", "checkpoint", "restore", "export", "2 workers"]
    assert parts(done.out) == expected
    assert "for 24 steps, with 8 checkpoints and 7 validations" in done.out
    assert "logged in step 3 with other numbers: 'seconds'; unless they are times, keep" in done.out
    assert re.search(r"memory +0\.\d\d GiB on the host, at the worker's peak", done.out)
    both, alone = re.findall(r"step 3 again, loss (\S+); on one worker (\S+)", done.out)[0]
    assert both == alone
    assert "price" not in done.out, "this machine is none of a cloud"
    assert tiny.left == [run]
    assert run.read_text() == "{}"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("workers.cpus=3", "the cluster has room for one worker now"),
        pytest.param("workers.max=1", "workers.max is 1", marks=pytest.mark.nightly),
    ],
)
def test_a_change_of_workers_that_cannot_be_tried_is_named(tiny: Tiny, override: str, reason: str) -> None:
    """The cluster has four CPUs."""
    done = tiny.run("alone", override, "plan.epochs=1", "plan.max_steps=1")
    assert done.status == 0, done.err
    assert re.search(rf"^  2 workers +– +not tried, because {reason}$", done.out, re.MULTILINE)
    assert "for 1 step, with 1 checkpoint and 2 validations" in done.out
    assert not tiny.left


@pytest.mark.parametrize(
    ("fails", "status", "sentence"),
    [
        ("validate", 1, r"validate: ValueError: no labels at tiny\.py:30; correct the validation of the script"),
        pytest.param(
            "memory",
            1,
            r"step: .*perhaps by the system because memory ran out; lower plan\.micro_batch, .* more memory",
            marks=pytest.mark.nightly,
        ),
        (
            "average",
            1,
            r"restore: the loss of the validation is \S+ after 3 steps of a run that a new worker has resumed, and \S+ in the first run; "
            r"keep what the script has of its own, and reads later, with run\.state\(\) or in buffers of the model$",
        ),
        (
            "first batch",
            1,
            r"2 workers: the loss of the step is \S+ after 3 steps of a run on two workers, and \S+ in the first run; compute the loss of "
            r"a batch from its samples and the model alone, not from the rank, .* or from what earlier batches have changed$",
        ),
        (
            "rate",
            1,
            r"2 workers: the script gives other settings than to the first group: lr of parameter group 0 was 0\.001 and is 0\.002; all "
            r"groups of the test have the same job, so this depends on the workers or the time; derive",
        ),
        (
            "weights",
            1,
            r"2 workers: the weights after 3 steps are not those of one worker, although the losses are: the script",
        ),
        pytest.param(
            "scheduler",
            2,
            r"2 workers: the run was saved with step_size=9 of StepLR of torch, and the script gives 18; all groups of the test have the "
            r"same job",
            marks=pytest.mark.nightly,
        ),
        ("export", 2, r"export: 'phase' is complex, which Hugging Face's format cannot hold; use undula\.load_weights"),
        pytest.param(
            "2 workers",
            1,
            r"2 workers: .*RuntimeError: only one of us can be right at tiny\.py:.*; correct the script, or",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_failure_names_the_part_and_the_fix(tiny: Tiny, fails: str, status: int, sentence: str) -> None:
    done = tiny.run("fails", f"config.fails={fails}")
    assert re.match(sentence, failure(done, status))
    assert not tiny.left


def test_a_folder_without_permission_is_found_before_anything_starts(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = tiny.run("blocked", f"runs={tmp_path}/file")
    sentence = failure(done, 2)
    assert sentence.startswith("checkpoint: command line: runs: ")
    assert sentence.endswith("make room or get write permission there, or set another folder with runs")
    assert parts(done.out) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Folder on a file system of 128 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")
def test_a_full_disk_is_found(session_jobs: Jobs, small_disk: Path) -> None:
    done = session_jobs.run("full", "--smoke", f"runs={small_disk}", "workers.max=1")
    sentence = failure(done)
    assert sentence.startswith("checkpoint: RunError: the last checkpoint of the run could not be written: it needs ")
    assert f", and {small_disk}/full-smoke-" in sentence
    assert sentence.endswith("make room or get write permission there, or set another folder with runs")
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize("option", ["--in-process", "--fresh", "--detach", "--keep-alive"])
def test_options_that_a_smoke_test_cannot_have_are_refused(option: str) -> None:
    job = str(LANGUAGE_MODEL.with_suffix(".yaml"))
    command = [sys.executable, "-m", "undula.cli", "run", job, "--smoke", option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (
        2,
        f"undula: command line: --smoke cannot be combined with {option}; remove one of them\n",
    )


@pytest.mark.nightly
def test_a_worker_that_rays_memory_monitor_ends_is_found(script: Path, tmp_path: Path) -> None:
    """The worker takes 6 GiB, and the monitor of a cluster of its own leaves 4 GiB."""
    job = str(script.with_suffix(".yaml"))
    command = [
        sys.executable,
        "-m",
        "undula.cli",
        "run",
        job,
        "--smoke",
        f"runs={tmp_path}/runs",
        "config.fails=monitor",
    ]
    memory = psutil.virtual_memory()
    share = (memory.total - memory.available + 4 * 2**30) / memory.total
    env = {**os.environ, "RAY_memory_usage_threshold": f"{share:.3f}", "RAY_memory_monitor_refresh_ms": "100"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout
    sentence = done.stdout.splitlines()[-1]
    assert sentence.startswith(
        "undula: step: out of memory: Ray ended the process because its node ran low on memory; lower"
    )
    assert not list((tmp_path / "runs").iterdir())
