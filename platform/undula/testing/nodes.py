"""Several Ray nodes on one machine: added, drained with a notice, and killed as a whole with their memory, as a cloud takes machines."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import psutil

from undula.cluster.local import LocalCluster, free_ports, local_cluster
from undula.elastic.ray.gcs import Head
from undula.errors import ClusterError
from undula.recovery.snapshot import MEMORY

START_TIMEOUT_S = 20.0
ANSWER_LIMIT_S = 30.0
"""Of a head beside which many nodes start on few cores."""
ATTEMPTS = 4


class Nodes:
    """A cluster whose nodes come and go.

    Attributes:
        nodes: ids of those that were added and not killed, those that are still starting included, in order.
    """

    def __init__(self, cluster: LocalCluster, env: Mapping[str, str]):
        self.cluster = cluster
        self.nodes: list[str] = []
        self._env = {**os.environ, **cluster.env, **env}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._notices: dict[str, float] = {}
        """Of nodes that have not joined yet: when they will go, in seconds since the epoch."""
        self._memory = Path(tempfile.mkdtemp(prefix="undula-nodes-", dir=MEMORY))
        self._head = Head(cluster.address, self._env, ANSWER_LIMIT_S)
        # One after another: of two that start at once on a machine, one may never get to its end.
        self._to_start: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._starter = threading.Thread(target=self._start_all, name="undula-nodes", daemon=True)
        self._starter.start()

    def add(self, num_cpus: int = 1) -> str:
        """Start a node; its id. It joins within seconds."""
        node = secrets.token_hex(28)
        self.nodes.append(node)
        self._to_start.put((node, num_cpus))
        return node

    def await_all(self) -> None:
        """Wait until every node has joined; ClusterError where one does not."""
        deadline = time.monotonic() + ATTEMPTS * START_TIMEOUT_S
        while not set(self.nodes) <= set(self.alive()):
            if time.monotonic() > deadline:
                raise ClusterError(f"not all of {len(self.nodes)} nodes came up")
            time.sleep(0.1)  # paces the looks

    def alive(self) -> list[str]:
        """Ids of the nodes that the head takes for alive, its own included."""
        return list(self._head.ask("alive"))

    def count(self) -> dict[str, int]:
        """Actors that are alive, and placement groups."""
        return dict(self._head.ask("count"))

    def drain(self, node: str, deadline_s: float) -> None:
        """Tell the cluster that a node will go in so many seconds, as a cloud's notice of preemption does; or, as soon as it has joined."""
        self._notices[node] = time.time() + deadline_s
        if node in self.alive():
            self._pass_on_notice(node)

    def _pass_on_notice(self, node: str) -> None:
        if (deadline := self._notices.pop(node, None)) is not None:
            self._head.drain(node, deadline)

    def kill(self, node: str) -> None:
        """SIGKILL everything on a node at once; what it had in memory is gone."""
        if node in self.nodes:
            self.nodes.remove(node)
        if process := self._processes.pop(node, None):
            _kill_tree(process)
        shutil.rmtree(self._memory / node, ignore_errors=True)

    def processes_of(self, node: str) -> list[int]:
        """Everything that runs on a node."""
        return descendants(self._processes[node].pid) if node in self._processes else []

    def head_processes(self) -> list[int]:
        """Everything that runs on the head."""
        return descendants(self.cluster.pid)

    def close(self) -> None:
        self._to_start.put(None)
        for node in list(self.nodes):
            self.kill(node)
        self._starter.join(timeout=START_TIMEOUT_S)
        for process in self._processes.values():
            _kill_tree(process)
        self._head.close()
        shutil.rmtree(self._memory, ignore_errors=True)

    def _start_all(self) -> None:
        while (wanted := self._to_start.get()) is not None:
            node, num_cpus = wanted
            for _ in range(ATTEMPTS):
                if node not in self.nodes or self._starts(node, num_cpus):
                    break

    def _starts(self, node: str, num_cpus: int) -> bool:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={self.cluster.address}"),
            *(f"--num-cpus={num_cpus}", f"--object-store-memory={200 * 2**20}", "--disable-usage-stats"),
            *("--include-log-monitor=False", f"--dashboard-agent-listen-port={free_ports(1)[0]}"),
        ]
        (self._memory / node).mkdir(exist_ok=True)
        own = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node, "UNDULA_MEMORY": str(self._memory / node)}
        process = subprocess.Popen(
            command, env={**self._env, **own},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._processes[node] = process
        deadline = time.monotonic() + START_TIMEOUT_S
        while node in self.nodes and process.poll() is None and time.monotonic() < deadline:
            with suppress(ClusterError, OSError, ValueError):
                if node in self.alive():
                    self._pass_on_notice(node)
                    return True
            time.sleep(0.1)  # paces the looks
        _kill_tree(process)
        return False


@contextmanager
def nodes(
    head_cpus: int = 0, env: Mapping[str, str] | None = None, node_env: Mapping[str, str] | None = None
) -> Iterator[Nodes]:
    """A cluster for this block, whose head trains nothing by default; nodes are added to it.

    Args:
        head_cpus: of the head.
        env: environment of all of it.
        node_env: of the nodes that are added, besides.
    """
    settings = {"RAY_worker_niceness": "0", "MIMALLOC_PURGE_DELAY": "10000", **(env or {}), **(node_env or {})}
    with local_cluster(num_cpus=head_cpus, env=env) as cluster:
        found = Nodes(cluster, settings)
        try:
            yield found
        finally:
            found.close()


def descendants(pid: int) -> list[int]:
    """Ids of a process's children, of their children, and so on; none if the process is gone."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process and to all of its descendants."""
    for each in [pid, *descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _kill_tree(process: "subprocess.Popen[bytes]") -> None:
    kill_tree(process.pid)
    process.wait()
