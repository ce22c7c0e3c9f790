"""Tests of submission through Ray's job API: the documented command, and `undula run` with a new or a running cluster."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from jobs_kit import ROOT, SMALL, Jobs

from undula.cluster.forking.interpreter import write_interpreter
from undula.cluster.local import job_api_answers, local_cluster
from undula.state.ledger import read_ledger
from undula.state.processes import send_signal, signal_group
from undula.storage import open_store

UNDULA = (str(Path(sys.executable).parent / "undula"),)
RAY = str(Path(sys.executable).parent / "ray")
JOB = str(ROOT / "jobs" / "language_model.yaml")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter that has all packages of this one except this project."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # Below a path that a .pth file names, further .pth files (the editable install's) are not read.
    (ours,) = (path for path in sys.path if path.endswith("site-packages"))
    (site_packages / "borrowed.pth").write_text(f"{ours}\n")
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-c", "import ray, torch"], check=True)
    assert subprocess.run([python, "-c", "import undula"], capture_output=True).returncode == 1
    return python


def test_ray_job_submit_on_nodes_without_the_package(bare_python: str, text: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "undula" / "data").mkdir(parents=True)
    (home / "undula" / "data" / "stdlib-text").symlink_to(text)
    (tmp_path / "python").mkdir()
    python = write_interpreter(tmp_path / "python", bare_python)
    with local_cluster(num_cpus=4, env={"HOME": str(home)}, python=python) as cluster:
        command = [
            *(RAY, "job", "submit", "--address", cluster.dashboard, "--runtime-env", "jobs/runtime_env.yaml", "--"),
            *("python", "jobs/language_model.py", "--config", "jobs/language_model.yaml", *SMALL, "plan.max_steps=10"),
        ]
        env = {**os.environ, **cluster.env}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "finished: validation loss" in done.stdout
        assert read_ledger(open_store(str(home / "undula" / "runs" / "language-model"))).steps.num_rows == 10

        # Token authentication is on: without the token the same command is turned away.
        bare = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
        stranger = subprocess.run(
            command, cwd=ROOT, env={**bare, "RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True, timeout=300
        )
        assert stranger.returncode != 0
        assert "Unauthorized" in stranger.stdout + stranger.stderr


@pytest.fixture
def mark() -> Iterator[str]:
    """Mark for the environment of all processes that a test starts, so that remaining ones can be found and ended."""
    name = uuid.uuid4().hex
    yield name
    for process in marked(name):
        send_signal(process, signal.SIGKILL)


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes with a mark in their environment."""
    processes = psutil.process_iter(["environ", "cmdline"])
    return [process for process in processes if mark in (process.info["environ"] or {}).values()]


def drivers_of(argument: str) -> list[psutil.Process]:
    """Return the Python processes that run a job script with an argument."""
    drivers = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if Path(words[0]).name.startswith("python") and argument in words and "--config" in words:
            drivers.append(process)
    return drivers


def start_undula_run(
    undula: Sequence[str],
    mark: str,
    text: str,
    runs: Path,
    *overrides: str,
    env: dict[str, str] | None = None,
) -> "subprocess.Popen[str]":
    data = (f"data.train={text}/train", f"data.validation={text}/validation", f"runs={runs}")
    bare = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return subprocess.Popen(
        [*undula, "run", JOB, *SMALL, *data, *overrides],
        env={**bare, "UNDULA_TEST_MARK": mark, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background may have SIGINT ignored, which child processes inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def await_nothing_left(mark: str) -> None:
    deadline = time.monotonic() + 30
    while left := marked(mark):
        assert time.monotonic() < deadline, [process.info["cmdline"] for process in left]
        time.sleep(0.1)  # limits the polling rate


def test_undula_run_starts_a_cluster_and_leaves_no_process_behind(mark: str, text: str, tmp_path: Path) -> None:
    process = start_undula_run(UNDULA, mark, text, tmp_path, "name=own", "plan.max_steps=10")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert "started with 2 workers" in out
    assert re.search(
        r"^step 10/10  loss \d\.\d{4}  lr \d\.\d\de-\d\d  [\d,]+ samples/s  2 workers  0:00 left$", out, re.M
    )
    assert "finished: validation loss" in out
    noise = [line for line in (out + err).splitlines() if re.search(r"\b(INFO|WARNING|pid=|Autoscaler)\b", line)]
    assert not noise, "Ray's own talk belongs into its files"
    await_nothing_left(mark)

    # The cluster is gone, and with it the logs of Ray.
    bare = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "UNDULA_"))}
    logs = subprocess.run(
        [*UNDULA, "logs", str(tmp_path / "own")], env=bare, capture_output=True, text=True, timeout=60
    )
    lines = [line for line in out.splitlines() if not line.startswith("step ")]
    assert logs.stdout.splitlines() == lines[lines.index(next(line for line in lines if "starts: rank 0" in line)) :]


@pytest.mark.nightly
def test_ctrl_c_leaves_no_process_behind(mark: str, text: str, tmp_path: Path) -> None:
    process = start_undula_run(UNDULA, mark, text, tmp_path, "name=interrupted", "plan.max_steps=1000000")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    signal_group(process, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    assert "stopping ..." in out.splitlines()
    await_nothing_left(mark)


@pytest.mark.nightly
def test_undula_run_uses_a_running_cluster_and_does_not_stop_it(
    mark: str, text: str, tmp_path: Path, session_jobs: Jobs
) -> None:
    cluster = session_jobs.cluster
    env = {**cluster.env, "RAY_API_SERVER_ADDRESS": cluster.dashboard}
    process = start_undula_run(UNDULA, mark, text, tmp_path, "name=guest", "plan.max_steps=10", env=env)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert job_api_answers(cluster.dashboard)
    await_nothing_left(mark)

    # A killed driver cannot print anything itself.
    process = start_undula_run(UNDULA, mark, text, tmp_path, "name=killed", "plan.max_steps=1000000", env=env)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step "))
    (driver,) = drivers_of("name=killed")
    send_signal(driver, signal.SIGKILL)
    out, _ = process.communicate(timeout=300)
    assert process.returncode not in (0, 1, 2)
    assert (
        f"the job's driver was killed\nrun directory: {tmp_path}/killed\nsubmit it again under the name killed" in out
    )

    # The job API passes on the message and the exit status of a user's mistake.
    process = start_undula_run(
        UNDULA, mark, text, tmp_path, "name=guest", "plan.max_steps=10", "config.nothing=1", env=env
    )
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "unknown key config.nothing" in out
