"""Tests of `undula doctor` on real clusters of this machine: a healthy one, faulty ones, and nodes that hang or die during the check."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_drivers import with_forked_drivers
from waiting import wait_until

from undula.cluster.local import LocalCluster, local_cluster
from undula.plan.rates import read_rates
from undula.state.processes import send_signal, signal_group
from undula.storage import open_store
from undula.testing.nodes import Nodes, nodes

LIMIT_S = 300.0
OF_THIS_MACHINE = {"disk", "memory", "notices"}
"""Checks whose verdict depends on the machine that runs the tests; they may warn."""


@dataclass(frozen=True)
class Examined:
    """Finished run of the doctor."""

    status: int
    took_s: float
    results: list[dict[str, str]]
    facts: dict[str, Any]

    def of(self, verdict: str) -> dict[str, str]:
        """Return the messages by check."""
        return {result["check"]: result["message"] for result in self.results if result["verdict"] == verdict}


@pytest.fixture(scope="module")
def two_nodes(forking_python: str) -> Iterator[Nodes]:
    with nodes(python=forking_python) as cluster:
        cluster.add()
        cluster.add()
        cluster.await_all()
        cluster.cluster = with_forked_drivers(cluster.cluster)
        yield cluster


@pytest.fixture
def third_node(two_nodes: Nodes) -> Iterator[str]:
    """Node that a test may stop or kill."""
    node = two_nodes.add()
    two_nodes.await_all()
    yield node
    two_nodes.kill(node)
    await_without(two_nodes, node)


def await_without(cluster: Nodes, node: str) -> None:
    """Wait until Ray knows that a node has ended."""
    wait_until(lambda: node not in cluster.alive(), LIMIT_S)


def start(cluster: LocalCluster, runs: Path | str, *options: str, **env: str) -> "subprocess.Popen[str]":
    python = sys.executable if env else cluster.python  # in a fork, Ray would not see its variables
    command = [
        *(python, "-m", "undula.cli", "doctor", "--cluster", cluster.address, "--runs", str(runs)),
        *options,
    ]
    return subprocess.Popen(
        command, env={**os.environ, **cluster.env, **env},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Return what the process printed; kill it if it does not end."""
    try:
        return process.communicate(timeout=2 * LIMIT_S)
    finally:
        signal_group(process, signal.SIGKILL)


def examine(cluster: LocalCluster, runs: Path | str, **env: str) -> Examined:
    started = time.monotonic()
    return end(start(cluster, runs, "--json", **env), started)


def end(process: "subprocess.Popen[str]", started: float) -> Examined:
    out, err = finish(process)
    assert process.returncode in (0, 1), out + err
    return Examined(process.returncode, time.monotonic() - started, **json.loads(out))


def assert_others_examined(examined: Examined, node: str) -> None:
    assert set(examined.facts["unresponsive"]) == {node}
    assert set(examined.facts["stored"]) == {member["id"] for member in examined.facts["nodes"]} - {node}


def await_probe(cluster: Nodes, node: str, process: "subprocess.Popen[str]") -> None:
    """Wait for the probe of a node."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        for worker in cluster.processes_of(node):
            with suppress(psutil.Error):
                if "ray::Probe" in " ".join(worker.cmdline()):
                    return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)  # limits the polling rate


@pytest.mark.nightly
def test_a_healthy_cluster_passes(two_nodes: Nodes, tmp_path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        examined = examine(two_nodes.cluster, tmp_path / "runs")
        if not examined.facts["unresponsive"] or time.monotonic() > deadline:
            break  # a node of a busy machine can be too late for its report
    assert examined.of("fail") == {}
    assert examined.status == 0
    assert set(examined.of("warn")) <= OF_THIS_MACHINE
    assert examined.took_s < LIMIT_S
    assert "3 nodes answer, and workers fit on 2" in examined.of("pass")["nodes"]
    assert examined.facts["dashboard_status"] == 401
    reduced = examined.facts["all_reduce"]
    assert reduced["backend"] == "gloo"
    assert set(reduced["nodes"]) == set(two_nodes.nodes)
    assert reduced["bytes_per_s"] > 0
    assert reduced["latency_s"] > 0
    offsets_s = [clock["offset_s"] for clock in examined.facts["clocks"].values()]
    assert len(offsets_s) == len(two_nodes.nodes) + 1  # with the head
    assert max(map(abs, offsets_s)) < 0.5
    assert len(examined.facts["stored"]) == 3
    assert list((tmp_path / "runs").iterdir()) == [], "the doctor leaves files behind"


@pytest.mark.nightly
@pytest.mark.nightly
def test_a_worker_and_the_link_between_two_are_measured(two_nodes: Nodes, tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    process = start(two_nodes.cluster, tmp_path / "runs", "--measure", str(file))
    out, err = finish(process)
    assert process.returncode == 0, out + err
    rates = read_rates(file.read_text())
    assert rates.rates.keys() == {"fp32", "bf16"}
    assert rates.link is not None
    assert rates.link.bytes_per_s > 1e7
    assert f"undula plan JOB.yaml --rates {file}" in out


@pytest.mark.nightly
def test_an_unwritable_runs_folder_is_reported_with_the_fix(two_nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = start(two_nodes.cluster, tmp_path / "file" / "runs")
    out, err = finish(process)
    assert process.returncode == 1, out + err
    (line,) = [line for line in out.splitlines() if line.startswith("fail")]
    assert line.startswith("fail  storage     the head ")
    assert f"cannot write {tmp_path}/file/runs" in line
    assert "Not a directory; set --runs to a folder" in line
    assert "1 to fix; 3 nodes in" in out


@pytest.mark.nightly
def test_ray_without_its_token_fails(forking_python: str, s3: Any) -> None:
    with local_cluster(num_cpus=1, env={"RAY_AUTH_MODE": "disabled"}, python=forking_python) as cluster:
        examined = examine(cluster, s3.url("runs"), RAY_AUTH_MODE="disabled")
    assert examined.status == 1
    assert set(examined.of("fail")) == {"token"}
    assert "RAY_AUTH_MODE=token" in examined.of("fail")["token"]
    assert "nothing was measured" in examined.of("pass")["all-reduce"]
    (stored,) = examined.facts["stored"].values()
    assert stored["problem"] is None
    assert stored["sees_ours"]
    assert open_store(s3.url("runs")).list() == [], "the doctor leaves files behind"


@pytest.fixture(scope="module")
def without_token(two_nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> "subprocess.Popen[str]":
    """Doctor without a token. It takes 20 s, in which other tests run."""
    folder = tmp_path_factory.mktemp("without-token")
    return start(two_nodes.cluster, folder, RAY_AUTH_TOKEN_PATH=str(folder / "token"), RAY_AUTH_MODE="disabled")


@pytest.mark.nightly
@pytest.mark.usefixtures("without_token")
def test_a_node_that_hangs_is_named(two_nodes: Nodes, third_node: str, tmp_path: Path) -> None:
    """The raylet and its children are stopped. Ray considers the node alive for longer than the examination takes."""
    for process in two_nodes.processes_of(third_node):
        send_signal(process, signal.SIGSTOP)
    examined = examine(two_nodes.cluster, tmp_path)
    assert examined.status == 1
    assert examined.took_s < LIMIT_S
    assert set(examined.of("fail")) == {"nodes"}
    assert f"({third_node[:8]}) could not be examined completely (no answer within" in examined.of("fail")["nodes"]
    assert_others_examined(examined, third_node)


@pytest.mark.nightly
def test_a_node_that_dies_during_the_examination_is_named(two_nodes: Nodes, third_node: str, tmp_path: Path) -> None:
    started = time.monotonic()
    process = start(two_nodes.cluster, tmp_path, "--json")
    await_probe(two_nodes, third_node, process)
    two_nodes.kill(third_node)
    examined = end(process, started)
    assert examined.status == 1
    assert examined.took_s < LIMIT_S
    assert f"({third_node[:8]}) could not be examined completely" in examined.of("fail")["nodes"]
    assert_others_examined(examined, third_node)


def test_a_missing_token_is_reported_with_the_variable_to_set(without_token: "subprocess.Popen[str]") -> None:
    _, err = finish(without_token)
    assert without_token.returncode == 3
    assert "it rejects the token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH" in err


@pytest.fixture
def odd_node(two_nodes: Nodes, tmp_path: Path) -> Iterator[str]:
    """Node that has another pyarrow, a configured GPU that does not exist, and another disk at `runs`."""
    cluster, others = two_nodes.cluster, set(two_nodes.alive())
    (tmp_path / "runs").mkdir()
    other = tmp_path / "packages" / "pyarrow-25.0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: pyarrow\nVersion: 25.0.0\n")
    ray_start = (
        f"{sys.executable} -m ray.scripts.scripts start --block --address={cluster.address} --num-cpus=1 --disable-usage-stats "
        f"--object-store-memory={200 * 2**20} --include-log-monitor=False --dashboard-agent-listen-port=0"
    )
    env = {
        **os.environ,
        **cluster.env,
        "PYTHONPATH": f"{other.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "RAY_OVERRIDE_RESOURCES": '{"GPU": 1}',
    }
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none {tmp_path}/runs && exec {ray_start}"],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    node = ""
    try:
        wait_until(lambda: len(set(two_nodes.alive()) - others) == 1, LIMIT_S, process)
        (node,) = set(two_nodes.alive()) - others
        yield node
    finally:
        signal_group(process, signal.SIGTERM)  # Ray notices after seconds that a killed node has ended
        await_without(two_nodes, node)
        signal_group(process, signal.SIGKILL)
        process.wait()


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")
def test_a_node_that_differs_from_the_others_is_named(two_nodes: Nodes, odd_node: str, tmp_path: Path) -> None:
    examined = examine(two_nodes.cluster, tmp_path / "runs")
    assert examined.status == 1
    fails = examined.of("fail")
    assert set(fails) == {"versions", "gpus", "storage"}
    assert fails["versions"].startswith("pyarrow is ")
    assert "25.0.0 on " in fails["versions"]
    assert "torch sees 0" in fails["gpus"]
    assert f"{examined.facts['nodes'][0]['address']} ({odd_node[:8]}): files that the head writes" in fails["storage"]
    assert "all-reduce" in examined.of("pass"), "torch without a GPU reduces with gloo"


def test_a_head_that_accepts_connections_but_does_not_answer_ends_the_command(tmp_path: Path) -> None:
    program = "from undula.cli import main as cli; from undula.cluster import examine; examine.CONNECT_LIMIT_S = 2.0; cli.main()"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-c", program, "doctor", "--cluster", address, "--runs", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"undula: cannot connect to the Ray cluster {address}: no answer within 2 s")


def test_a_missing_cluster_ends_the_command_with_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "undula.cli", "doctor", "--cluster", "127.0.0.1:9", "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 3
    assert done.stderr.startswith("undula: cannot connect to the Ray cluster 127.0.0.1:9: ")
