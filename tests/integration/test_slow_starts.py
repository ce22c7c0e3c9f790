"""Tests of local clusters on machines so busy that Ray's own limits for their processes end."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from undula.cluster import local
from undula.cluster.local import LocalCluster, await_start, local_cluster, starting_cluster
from undula.errors import ClusterError
from undula.state.processes import descendants, send_signal

AGENTS_S = 17
"""Seconds by which the agents of a node start late. A raylet waits for less, if agents choose their ports."""
RAYLET_S = 32
"""Seconds for which a raylet does nothing, more than `ray start` waits by default."""
SLOW = f"""
import sys, time
if any(each.endswith(("dashboard/agent.py", "runtime_env/agent/main.py")) for each in sys.orig_argv):
    time.sleep({AGENTS_S})
"""


def raylets(cluster: LocalCluster) -> Iterator[psutil.Process]:
    for process in descendants(cluster.process):
        with suppress(psutil.NoSuchProcess):
            if process.name() == "raylet":
                yield process


@pytest.mark.nightly
def test_a_cluster_whose_agents_start_slowly_runs_a_job(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    with local_cluster(num_cpus=1, env={"PYTHONPATH": path}) as cluster:
        submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", cluster.dashboard]
        job = subprocess.run(
            [*submit, "--", "true"],
            env={**os.environ, **cluster.env}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
    assert "succeeded" in job.stdout, job.stdout + job.stderr
    assert time.monotonic() - began > AGENTS_S


def test_a_raylet_that_ends_while_it_starts_ends_the_start(tmp_path: Path) -> None:
    with starting_cluster(num_cpus=1, accepts_jobs=False) as cluster:

        def kill() -> bool:
            for raylet in raylets(cluster):
                send_signal(raylet, signal.SIGKILL)
            return False

        began = time.monotonic()
        with pytest.raises(ClusterError, match="the local Ray cluster lost its raylet while it started"):
            await_start(cluster, kill)
        assert time.monotonic() - began < RAYLET_S


@pytest.mark.nightly
def test_a_cluster_whose_raylet_starts_slowly_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "SLOW_START_S", 1.0)
    with starting_cluster(num_cpus=1, accepts_jobs=False) as cluster:
        wait_until(lambda: any(raylets(cluster)), 60)
        (raylet,) = raylets(cluster)
        send_signal(raylet, signal.SIGSTOP)
        assert not cluster.raylet_socket.exists()
        time.sleep(RAYLET_S)
        send_signal(raylet, signal.SIGCONT)
        with caplog.at_level(logging.WARNING, "undula"):
            await_start(cluster, cluster.raylet_socket.exists)
        wait_until(lambda: "Ray runtime started" in (cluster.folder / "start.log").read_text(), 60)
