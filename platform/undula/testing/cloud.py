"""Simulated cloud on this machine: Ray's autoscaler starts and ends its machines, and spot machines get notices as in a real cloud."""

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import psutil
import yaml
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from undula.cluster.local import LocalCluster, local_cluster
from undula.plan.fleet import MACHINE, MARKET, TYPE
from undula.state.defaults import MEMORY
from undula.state.processes import ProcessIdentity, find_process, identity_of, is_alive, kill_tree
from undula.testing.machine import MACHINE_FILE, NOTICE

HEAD = "head"
ADDRESS = "address"
AVAILABLE = "available.json"
"""File with the number of machines that each market offers."""
PROCESS = "process.json"
"""File in the folder of a machine with the identity of its process."""
STOP_S = 10.0
"""Maximum time in seconds for a machine to stop."""
UNUSED_KEYS: Mapping[str, Any] = {
    "auth": {},
    "cluster_synced_files": [],
    "file_mounts": {},
    "file_mounts_sync_continuously": False,
    "head_setup_commands": [],
    "head_start_ray_commands": [],
    "initialization_commands": [],
    "rsync_exclude": [],
    "rsync_filter": [],
    "setup_commands": [],
    "worker_setup_commands": [],
    "worker_start_ray_commands": [],
}
"""Keys that Ray's autoscaler requires in its configuration, although the simulated cloud does not use them."""


@dataclass(frozen=True)
class MachineType:
    """Machine type that a cloud offers."""

    market: str
    """Market of the machines, SPOT or ON_DEMAND of `undula.plan.fleet`."""
    machine: str
    """Name of the machine type in the cloud's price list."""
    cpus: int = 1
    gpus: int = 0
    """Number of GPUs that Ray counts. They need not exist."""
    priority: int = 0
    """Priority of the type; the autoscaler prefers the highest."""


@dataclass(frozen=True)
class CloudMachine:
    """Running machine of a simulated cloud."""

    node: str
    """Ray's id of the node on the machine."""
    market: str
    began: float
    """Start of the machine in seconds since the epoch."""


class Cloud:
    """Simulated cloud under a cluster. Each machine has a subfolder of `folder` with its description, its notice and its logs."""

    def __init__(self, folder: Path, cluster: LocalCluster):
        self.folder = folder
        self.cluster = cluster

    def machines(self) -> list[CloudMachine]:
        """Return the running machines, oldest first."""
        return sorted((machine for machine, _ in _running(self.folder)), key=lambda machine: machine.began)

    def preempt(self, node: str, notice_s: float) -> None:
        """Let the metadata server of a machine give a notice of `notice_s` seconds. With 0, end the machine at once, without a notice."""
        if notice_s:
            (self.folder / node / NOTICE).write_text(str(notice_s))
            return
        for machine, process in _running(self.folder):
            if machine.node == node:
                kill_tree(process)

    def offer(self, market: str, count: int) -> None:
        """Set how many machines a market offers. Running machines beyond this number are not ended."""
        path = self.folder / AVAILABLE
        counts = {**json.loads(path.read_text()), market: count}
        (path.with_suffix(".new")).write_text(json.dumps(counts))
        path.with_suffix(".new").replace(path)

    def lines_of_watcher(self, node: str) -> list[str]:
        """Return the lines that a machine's spot watcher has printed."""
        return (self.folder / node / "watch.log").read_text().splitlines()

    def await_count(self, is_right: Callable[[Sequence[CloudMachine]], bool], limit_s: float) -> list[CloudMachine]:
        """Wait until the running machines fulfil a condition, and return them.

        Raises:
            AssertionError: The condition was not fulfilled within `limit_s` seconds.
        """
        deadline = time.monotonic() + limit_s
        while not is_right(machines := self.machines()):
            if time.monotonic() > deadline:
                raise AssertionError(f"after {limit_s:g} s the machines are {machines}")
            time.sleep(0.1)
        return machines


@contextmanager
def cloud(
    types: Mapping[str, MachineType],
    available: Mapping[str, int],
    idle_s: float = 3.0,
    max_workers: int = 8,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[Cloud]:
    """Start a cluster for this block: a head without CPUs, and machines that Ray's autoscaler requests from a simulated cloud.

    Args:
        types: Machine types by name.
        available: Number of machines that each market offers.
        idle_s: Time in seconds after which the autoscaler ends an idle machine.
        max_workers: Maximum number of machines.
        env: Additional environment variables of all processes.
        python: Interpreter of the Ray nodes and their jobs.
    """
    folder = Path(tempfile.mkdtemp(prefix="undula-cloud-", dir=MEMORY))
    (folder / AVAILABLE).write_text(json.dumps(dict(available)))
    config = folder / "autoscaling.yaml"
    config.write_text(yaml.safe_dump(_config(folder, types, idle_s, max_workers, python)))
    settings = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD,
        "RAY_NODE_TYPE_NAME": HEAD,
        "RAY_worker_niceness": "0",
        **(env or {}),
    }
    try:
        with local_cluster(num_cpus=0, env=settings, python=python, autoscaling=config) as cluster:
            (folder / ADDRESS).write_text(cluster.address)
            try:
                yield Cloud(folder, cluster)
            finally:
                for _, process in _running(folder):
                    kill_tree(process)
    finally:
        for _, process in _running(folder):  # machines that the autoscaler has started in the meantime
            kill_tree(process)
        rmtree(folder, ignore_errors=True)


def _config(
    folder: Path, types: Mapping[str, MachineType], idle_s: float, max_workers: int, python: str
) -> dict[str, Any]:
    workers = {
        name: {
            "resources": {"CPU": node_type.cpus, "GPU": node_type.gpus},
            "labels": {MARKET: node_type.market, MACHINE: node_type.machine, TYPE: name},
            "min_workers": 0,
            "max_workers": max_workers,
            "priority": node_type.priority,
            "node_config": {"market": node_type.market},
        }
        for name, node_type in types.items()
    }
    module = f"{LocalNodeProvider.__module__}.{LocalNodeProvider.__name__}"
    return {
        **UNUSED_KEYS,
        "cluster_name": "local",
        "max_workers": max_workers,
        "idle_timeout_minutes": idle_s / 60,
        "upscaling_speed": 100.0,
        "provider": {
            "type": "external",
            "module": module,
            "folder": str(folder),
            "python": python,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            HEAD: {"resources": {"CPU": 0}, "labels": {}, "node_config": {}, "min_workers": 0, "max_workers": 0},
            **workers,
        },
        "head_node_type": HEAD,
    }


class LocalNodeProvider(NodeProvider):
    """Node provider of the simulated cloud, which Ray's autoscaler calls in its own process."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str):
        super().__init__(provider_config, cluster_name)
        self._folder = Path(provider_config["folder"])
        self._python = provider_config["python"]
        self._tags: dict[str, dict[str, str]] = {
            HEAD: {
                TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
                TAG_RAY_USER_NODE_TYPE: HEAD,
                TAG_RAY_NODE_NAME: HEAD,
                TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            }
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config

    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        running = [node for node in list(self._tags) if self.is_running(node)]
        return [node for node in running if tag_filters.items() <= self._tags[node].items()]

    def is_running(self, node_id: str) -> bool:
        return node_id == HEAD or (node_id in self._processes and self._processes[node_id].poll() is None)

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._tags[node_id]

    def set_node_tags(self, node_id: str, tags: Mapping[str, str]) -> None:
        self._tags[node_id].update(tags)

    def internal_ip(self, node_id: str) -> str:
        return "127.0.0.1"

    external_ip = internal_ip

    def create_node_with_resources_and_labels(
        self,
        node_config: Mapping[str, Any],
        tags: Mapping[str, str],
        count: int,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
    ) -> None:
        """Start machines.

        Raises:
            RuntimeError: The market offers fewer machines. Ray's autoscaler gets the same error from a real cloud.
        """
        market = node_config["market"]
        for _ in range(count):
            taken = sum(machine.market == market for machine, _ in _running(self._folder))
            if taken >= json.loads((self._folder / AVAILABLE).read_text()).get(market, 0):
                raise RuntimeError(f"InsufficientInstanceCapacity: the cloud has only {taken} {market} machines")
            self._create(market, tags, resources, labels)

    def _create(
        self, market: str, tags: Mapping[str, str], resources: Mapping[str, float], labels: Mapping[str, str]
    ) -> None:
        node = secrets.token_hex(28)
        folder = self._folder / node
        (folder / "memory").mkdir(parents=True)
        own = {
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": node,
            "RAY_CLOUD_INSTANCE_ID": node,
            "RAY_NODE_TYPE_NAME": tags[TAG_RAY_USER_NODE_TYPE],
            "RAY_OVERRIDE_LABELS": json.dumps(dict(labels)),
            "UNDULA_MEMORY": str(folder / "memory"),
        }
        machine = asdict(CloudMachine(node, market, time.time()))
        address = (self._folder / ADDRESS).read_text()
        description = {
            **machine, "address": address, "resources": dict(resources), "env": own, "python": self._python
        }  # fmt: skip
        (folder / MACHINE_FILE).write_text(json.dumps(description))
        command = [sys.executable, "-m", "undula.testing.machine", str(folder)]
        self._tags[node] = {**tags, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}
        self._processes[node] = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        (folder / PROCESS).write_text(json.dumps(asdict(identity_of(self._processes[node]))))

    def terminate_node(self, node_id: str) -> None:
        process = self._processes[node_id]
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        rmtree(self._folder / node_id / "memory", ignore_errors=True)


def _running(folder: Path) -> list[tuple[CloudMachine, psutil.Process]]:
    """Return the machines that are running, each with its process."""
    running = []
    for path in folder.glob(f"*/{PROCESS}"):
        with suppress(OSError, ValueError):
            identity = ProcessIdentity(**json.loads(path.read_text()))
            description = json.loads((path.parent / MACHINE_FILE).read_text())
            process = find_process(identity)
            if process and is_alive(process):
                machine = CloudMachine(description["node"], description["market"], description["began"])
                running.append((machine, process))
    return running
