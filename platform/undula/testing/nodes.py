"""Several Ray nodes on one machine. They can be added, drained with a notice, and killed with all they have in memory, as in a cloud."""

import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import psutil

from undula.cluster.local import AGENTS, LocalCluster, free_ports, local_cluster
from undula.elastic.ray.gcs import Head
from undula.errors import ClusterError
from undula.state.defaults import MEMORY
from undula.state.processes import descendants, kill_tree

ATTEMPT_LIMIT_S = 60.0
"""Maximum seconds of an attempt to start a node, which takes half of it while three others start on two cores."""
JOIN_LIMIT_S = 300.0
"""Seconds after which no further attempt begins."""
AGENTS_LIMIT_S = 120
"""Maximum seconds until the agents of a node answer, before its first worker starts."""
ANSWER_LIMIT_S = 120.0
"""Time limit in seconds for an answer of the head, which is slow while many nodes start on few cores."""


class Nodes:
    """Cluster whose nodes can be added, drained and killed.

    Attributes:
        nodes: Ids of the nodes that were added and not killed, in order, including nodes that are still starting. A node that does not
            join is not kept.
    """

    def __init__(self, cluster: LocalCluster, env: Mapping[str, str]):
        self.cluster = cluster
        self.nodes: list[str] = []
        self._env = {**os.environ, **cluster.env, **env}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._changing = threading.Lock()
        """Held while a node's processes start or are killed, so that no process starts for a node that was killed."""
        self._notices: dict[str, float] = {}
        """Deadlines, in seconds since the epoch, of drained nodes that have not joined yet."""
        self._joined: set[str] = set()
        self._drained: set[str] = set()
        self._failures: list[str] = []
        """Descriptions of the nodes that did not join and that `await_all` has not reported."""
        self._memory = Path(tempfile.mkdtemp(prefix="undula-nodes-", dir=MEMORY))
        self._head = Head(cluster.address, self._env, ANSWER_LIMIT_S)
        # Nodes start one after another, because one of two that start at once on the same computer can hang.
        self._to_start: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._starter = threading.Thread(target=self._start_all, name="undula-nodes", daemon=True)
        self._starter.start()

    def add(self, num_cpus: int = 1) -> str:
        """Start a node and return its id. It joins the cluster within seconds."""
        node = secrets.token_hex(28)
        self.nodes.append(node)
        self._to_start.put((node, num_cpus))
        return node

    def await_all(self, limit_s: float = JOIN_LIMIT_S + ATTEMPT_LIMIT_S) -> None:
        """Wait until every node has joined.

        Args:
            limit_s: Maximum time in seconds.

        Raises:
            ClusterError: A node did not join, or has left the cluster without being killed.
        """
        deadline = time.monotonic() + limit_s
        while self._failures or (missing := set(self.nodes) - set(self.alive())):
            if self._failures:
                failures, self._failures = self._failures, []
                raise ClusterError("; ".join(failures))
            if lost := missing & self._joined:
                raise ClusterError(f"{_named(lost)} left the cluster and will not join it again; kill what has left")
            if not self._starter.is_alive():
                raise ClusterError("not all nodes joined the cluster, and no more are started")
            if time.monotonic() > deadline:
                raise ClusterError(f"{_named(missing)} did not join the cluster within {limit_s:.0f} s")
            time.sleep(0.1)

    def leaving(self) -> list[str]:
        """Return the ids of the nodes that were drained, or that the head has lost, and that were not killed."""
        alive = set(self.alive())
        return [node for node in self.nodes if node in self._drained or node in self._joined - alive]

    def alive(self) -> list[str]:
        """Return the ids of the nodes that the head considers alive, including its own."""
        return list(self._head.ask("alive"))

    def count(self) -> dict[str, int]:
        """Return the numbers of actors that are alive and of placement groups."""
        return dict(self._head.ask("count"))

    def drain(self, node: str, deadline_s: float) -> None:
        """Announce to the cluster, as a cloud's notice does, that a node ends in `deadline_s` seconds. A node that is still
        starting gets the notice when it joins.
        """
        self._notices[node] = time.time() + deadline_s
        self._drained.add(node)
        if node in self.alive():
            self._pass_on_notice(node)

    def _pass_on_notice(self, node: str) -> None:
        if (deadline := self._notices.pop(node, None)) is not None:
            self._head.drain(node, deadline)

    def kill(self, node: str) -> None:
        """Send SIGKILL to all processes of a node and delete its shared memory."""
        with self._changing:
            if node in self.nodes:
                self.nodes.remove(node)
            self._kill_processes(node)
        shutil.rmtree(self._memory / node, ignore_errors=True)

    def _kill_processes(self, node: str) -> None:
        if process := self._processes.pop(node, None):
            kill_tree(process)
            process.wait()

    def processes_of(self, node: str) -> list[psutil.Process]:
        """Return all processes of a node."""
        process = self._processes.get(node)
        return descendants(process) if process else []

    def head_processes(self) -> list[psutil.Process]:
        """Return all processes of the head."""
        return descendants(self.cluster.process)

    def close(self) -> None:
        """Kill all nodes."""
        self._to_start.put(None)
        for node in list(self.nodes):
            self.kill(node)
        self._starter.join(timeout=ATTEMPT_LIMIT_S)
        self._head.close()
        shutil.rmtree(self._memory, ignore_errors=True)

    def _start_all(self) -> None:
        while (wanted := self._to_start.get()) is not None:
            node, num_cpus = wanted
            began, attempts = time.monotonic(), 0
            while node in self.nodes and not self._try_to_start(node, num_cpus):
                if node not in self.nodes:
                    break  # it was killed
                attempts += 1
                after = f"after {time.monotonic() - began:.0f} s and {attempts} attempts"
                failure = f"node {node[:8]} has not joined the cluster {after}: {self._output(node)}"
                logging.getLogger("undula").warning("%s", failure)
                if time.monotonic() > began + JOIN_LIMIT_S:
                    self._give_up(node, failure)
                time.sleep(1.0)  # limits the rate of attempts that fail at once

    def _give_up(self, node: str, failure: str) -> None:
        with self._changing:
            if node in self.nodes:
                self.nodes.remove(node)
                self._failures.append(failure)

    def _output(self, node: str) -> str:
        """Return the last characters of the output of the attempts to start a node."""
        return " ".join(self._log(node).read_text(errors="replace").split())[-1000:] if self._log(node).exists() else ""

    def _log(self, node: str) -> Path:
        """File of the output of the attempts to start a node, which exists as long as the cluster."""
        return self.cluster.folder / f"start-{node[:8]}.log"

    def _try_to_start(self, node: str, num_cpus: int) -> bool:
        """Start a node, and return whether it joined the cluster in time."""
        agents = dict(zip(AGENTS, free_ports(len(AGENTS)), strict=True))
        command = _ray_start(self.cluster, num_cpus, agents)
        own = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node, "UNDULA_MEMORY": str(self._memory / node)}
        with self._changing:
            if node not in self.nodes:
                return False
            (self._memory / node).mkdir(exist_ok=True)
            # Ray does not pass this port on to the raylet. The raylet reads it from this file, into which the agent writes it too late.
            file = self.cluster.folder / "session_latest" / f"dashboard_agent_listen_port_{node}"
            file.write_text(str(agents["dashboard-agent-listen"]))
            with self._log(node).open("a") as log:
                process = self._processes[node] = subprocess.Popen(
                    command, env={**self._env, **own},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
        deadline = time.monotonic() + ATTEMPT_LIMIT_S
        while node in self.nodes and process.poll() is None and time.monotonic() < deadline:
            with suppress(ClusterError, OSError, ValueError):
                if node in self.alive():
                    self._joined.add(node)
                    self._pass_on_notice(node)
                    return True
            time.sleep(0.1)
        with self._changing:
            self._kill_processes(node)
        return False


@contextmanager
def nodes(
    head_cpus: int = 0,
    env: Mapping[str, str] | None = None,
    node_env: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[Nodes]:
    """Start a cluster for this block, to which nodes can be added.

    Args:
        head_cpus: Number of CPUs of the head; by default no worker fits on it.
        env: Additional environment variables of all processes.
        node_env: Additional environment variables of the added nodes.
        python: Interpreter of the nodes and their workers.
    """
    settings = {
        "RAY_worker_niceness": "0",
        "MIMALLOC_PURGE_DELAY": "10000",
        "RAY_agent_register_timeout_ms": f"{AGENTS_LIMIT_S}000",
        **(env or {}),
        **(node_env or {}),
    }
    with local_cluster(num_cpus=head_cpus, env=env, python=python) as cluster:
        started = Nodes(cluster, settings)
        try:
            yield started
        finally:
            started.close()


def _named(nodes: Collection[str]) -> str:
    return "nodes " + ", ".join(sorted(node[:8] for node in nodes))


def _ray_start(cluster: LocalCluster, num_cpus: int, agents: Mapping[str, int]) -> list[str]:
    return [
        *(cluster.python, "-m", "ray.scripts.scripts", "start", "--block", f"--address={cluster.address}"),
        *(f"--num-cpus={num_cpus}", f"--object-store-memory={200 * 2**20}", "--disable-usage-stats"),
        *("--include-log-monitor=False", *(f"--{agent}-port={port}" for agent, port in agents.items())),
    ]
