"""Tests of jobs that their user leaves: detached, followed, stopped, continued, and submitted again when the head was lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from jobs_kit import LANGUAGE_MODEL, SMALL, Jobs
from waiting import wait_until

from undula.cluster.local import _ray_start, free_ports, job_api_answers
from undula.state.ledger import read_ledger, steps_done
from undula.state.processes import kill_tree, send_signal
from undula.storage import open_store

LIMIT_S = 300.0
UNDULA = str(Path(sys.executable).parent / "undula")


@dataclass(frozen=True)
class User:
    """User with a terminal, whose commands are about one run."""

    env: Mapping[str, str]
    text: str
    runs: Path
    name: str
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    def run(self, *options: str) -> "subprocess.Popen[str]":
        """Start `undula run` for a job that trains for long."""
        data = (f"data.train={self.text}/train", f"data.validation={self.text}/validation", f"name={self.name}")
        settings = (*data, *SMALL, "workers.max=1", "plan.max_steps=1000000")
        return self.start("run", str(LANGUAGE_MODEL.with_suffix(".yaml")), *settings, *options)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [UNDULA, *arguments],
            env={**self.env, "UNDULA_RUNS": str(self.runs)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Tests that run in the background may have SIGINT ignored, which child processes inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def does(self, *arguments: str, status: int = 0) -> str:
        """Run a command to its end, and return its output."""
        out, _ = (process := self.start(*arguments)).communicate(timeout=LIMIT_S)
        assert process.returncode == status, out
        return out

    def interrupts(self, process: "subprocess.Popen[str]") -> str:
        """Press Ctrl-C once the command shows a step, and return what it prints then."""
        await_line(process, r"^step ")
        send_signal(process, signal.SIGINT)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, out
        return out

    @property
    def steps(self) -> int:
        return steps_done(read_ledger(open_store(str(self.runs / self.name))).steps)

    def ends(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()


def await_line(process: "subprocess.Popen[str]", pattern: str) -> str:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError("".join(seen))


@pytest.fixture
def user(session_jobs: Jobs, text: str, tmp_path: Path) -> Iterator[User]:
    cluster = session_jobs.cluster
    env = {**os.environ, **cluster.env, "UNDULA_ADDRESS": cluster.dashboard}
    person = User(env, text, tmp_path, f"left-{tmp_path.name}")
    yield person
    if "stop" not in [process.args[1] for process in person.started if process.returncode == 0]:  # type: ignore[index]
        person.start("stop", person.name).communicate(timeout=LIMIT_S)  # the test has failed
    person.ends()


def test_ctrl_c_leaves_a_job_of_a_running_cluster_alone_until_it_is_stopped(user: User) -> None:
    out = user.interrupts(user.run())
    assert "the job trains on the cluster without this command" in out
    assert f"undula stop {user.name} --address http://" in out
    before = user.steps
    wait_until(lambda: user.steps > before)
    assert [(row["run"], row["state"]) for row in json.loads(user.does("ls", "--json"))] == [(user.name, "running")]
    (stopped,) = json.loads(user.does("stop", user.name, "--json"))["stopped"]
    assert stopped


@pytest.mark.nightly
def test_a_detached_job_is_followed_stopped_and_continued(user: User) -> None:
    out, _ = (process := user.run("--detach")).communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert f"undula logs {user.name} --follow" in out
    for _ in range(2):  # each follower sees the lines from the beginning, and can leave
        user.interrupts(user.start("logs", user.name, "--follow"))
    follower = user.start("logs", user.name, "--follow")
    await_line(follower, r"^step ")
    assert "step " in user.does("logs", user.name)
    user.does("stop", user.name)
    assert "no job of" in user.does("stop", user.name, status=2)
    assert [row["state"] for row in json.loads(user.does("ls", "--json"))] == ["stopped"]
    follower.communicate(timeout=LIMIT_S)
    assert follower.returncode == 130
    done = user.steps
    assert done > 0
    user.run("--detach").communicate(timeout=LIMIT_S)
    follower = user.start("logs", user.name, "--follow")
    assert "resumed" in await_line(follower, r"Training (resumed|started)")
    wait_until(lambda: user.steps > done)
    user.does("stop", user.name)


@dataclass
class Heads:
    """Heads of a cluster at one address, one after another."""

    folder: Path
    gcs: int
    dashboard: int
    process: "subprocess.Popen[bytes] | None" = None

    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_ADDRESS": "",
        }

    def start(self) -> None:
        session = tempfile.mkdtemp(prefix="head-", dir=self.folder)
        command = _ray_start(sys.executable, 4, Path(session), self.gcs, self.dashboard, 200 * 2**20, None)
        log = subprocess.DEVNULL
        env = {**self.env(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        wait_until(lambda: job_api_answers(f"http://127.0.0.1:{self.dashboard}"))

    def kill(self) -> None:
        """Kill the head with all of its processes, as the loss of its machine does."""
        if self.process:
            kill_tree(self.process)
            self.process.wait()
        for process in psutil.process_iter(["environ"]):  # processes that left the tree
            if str(self.folder / "token") in (process.info["environ"] or {}).values() and process.pid != os.getpid():
                name = " ".join(process.cmdline()) if process.is_running() else ""
                if "undula run" not in name and f"{UNDULA} run" not in name:
                    send_signal(process, signal.SIGKILL)


@pytest.fixture
def heads() -> Iterator[Heads]:
    folder = Path(tempfile.mkdtemp(prefix="undula-"))
    (folder / "token").write_text("0" * 64)
    started = Heads(folder, *free_ports(2))
    yield started
    started.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.nightly
def test_a_job_continues_on_another_head_if_it_is_kept_alive(heads: Heads, text: str, tmp_path: Path) -> None:
    user = User({**heads.env(), "UNDULA_ADDRESS": f"http://127.0.0.1:{heads.dashboard}"}, text, tmp_path, "kept")
    process = user.run("--keep-alive", "checkpoint.every_steps=5")
    await_line(process, "waiting for the cluster at")
    heads.start()
    await_line(process, "^step ")
    wait_until(lambda: user.steps > 10)
    heads.kill()
    before = user.steps
    await_line(process, "lost the connection to the job, which continues; reconnecting")
    heads.start()
    await_line(process, "the cluster has lost the job, because its head was replaced; submitting the job again")
    assert "resumed" in await_line(process, r"Training (resumed|started)")
    wait_until(lambda: user.steps > before)
    user.does("stop", "kept")
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    user.ends()
