"""A cloud on this machine: Ray's own autoscaler brings and ends nodes, spot ones with notices, as a cloud does."""

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
from undula.recovery.snapshot import MEMORY
from undula.testing.machine import MACHINE_FILE, NOTICE
from undula.testing.nodes import kill_tree

HEAD = "head"
ADDRESS = "address"
THERE_IS = "there-is.json"
"""How many machines of each market can be had."""
STOP_S = 10.0
KEYS_THAT_RAY_EXPECTS: Mapping[str, Any] = {
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


@dataclass(frozen=True)
class MachineType:
    """What can be had of a cloud."""

    market: str
    """SPOT or ON_DEMAND of `undula.plan.fleet`."""
    machine: str
    """The cloud's name of it, which has a price."""
    cpus: int = 1
    priority: int = 0
    """The autoscaler takes the highest first."""


@dataclass(frozen=True)
class Machine:
    """A machine that is there."""

    node: str
    """Ray's id of it."""
    market: str
    began: float
    """Seconds since the epoch."""


class Cloud:
    """What is under a cluster. Machines are folders of `folder`: what they are, and what was told to them."""

    def __init__(self, folder: Path, cluster: LocalCluster):
        self.folder = folder
        self.cluster = cluster

    def machines(self) -> list[Machine]:
        """Those that run, the oldest first."""
        return sorted((machine for machine, _ in _running(self.folder)), key=lambda machine: machine.began)

    def preempt(self, node: str, notice_s: float) -> None:
        """Take a machine, after so many seconds of notice by its metadata server; none where that is 0."""
        if notice_s:
            (self.folder / node / NOTICE).write_text(str(notice_s))
            return
        for machine, pid in _running(self.folder):
            if machine.node == node:
                kill_tree(pid)

    def offer(self, market: str, count: int) -> None:
        """Have so many machines of a market, and no more; those beyond stay."""
        path = self.folder / THERE_IS
        counts = {**json.loads(path.read_text()), market: count}
        (path.with_suffix(".new")).write_text(json.dumps(counts))
        path.with_suffix(".new").replace(path)

    def lines_of_watcher(self, node: str) -> list[str]:
        """What a machine's spot watcher has printed."""
        return (self.folder / node / "watch.log").read_text().splitlines()

    def await_count(self, is_right: Callable[[Sequence[Machine]], bool], limit_s: float) -> list[Machine]:
        """Wait until the machines that run are as they should be; AssertionError after the time."""
        deadline = time.monotonic() + limit_s
        while not is_right(found := self.machines()):
            if time.monotonic() > deadline:
                raise AssertionError(f"after {limit_s:g} s the machines are {found}")
            time.sleep(0.1)  # paces the looks
        return found


@contextmanager
def cloud(
    types: Mapping[str, MachineType],
    there_is: Mapping[str, int],
    idle_s: float = 3.0,
    max_workers: int = 8,
    env: Mapping[str, str] | None = None,
) -> Iterator[Cloud]:
    """A cluster for this block: a head that trains nothing, and machines that Ray's autoscaler asks for.

    Args:
        types: of machines, by name.
        there_is: how many of each market can be had.
        idle_s: after which the autoscaler ends a machine that nobody uses.
        max_workers: most machines.
        env: environment of all of it.
    """
    folder = Path(tempfile.mkdtemp(prefix="undula-cloud-", dir=MEMORY))
    (folder / THERE_IS).write_text(json.dumps(dict(there_is)))
    config = folder / "autoscaling.yaml"
    config.write_text(yaml.safe_dump(_config(folder, types, idle_s, max_workers)))
    settings = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD,
        "RAY_NODE_TYPE_NAME": HEAD,
        "RAY_worker_niceness": "0",
        **(env or {}),
    }
    try:
        with local_cluster(num_cpus=0, env=settings, autoscaling=config) as cluster:
            (folder / ADDRESS).write_text(cluster.address)
            try:
                yield Cloud(folder, cluster)
            finally:
                for _, pid in _running(folder):
                    kill_tree(pid)
    finally:
        for _, pid in _running(folder):  # what the autoscaler has brought in the meantime
            kill_tree(pid)
        rmtree(folder, ignore_errors=True)


def _config(folder: Path, types: Mapping[str, MachineType], idle_s: float, max_workers: int) -> dict[str, Any]:
    workers = {
        name: {
            "resources": {"CPU": each.cpus},
            "labels": {MARKET: each.market, MACHINE: each.machine, TYPE: name},
            "min_workers": 0,
            "max_workers": max_workers,
            "priority": each.priority,
            "node_config": {"market": each.market},
        }
        for name, each in types.items()
    }
    module = f"{LocalNodeProvider.__module__}.{LocalNodeProvider.__name__}"
    return {
        **KEYS_THAT_RAY_EXPECTS,
        "cluster_name": "local",
        "max_workers": max_workers,
        "idle_timeout_minutes": idle_s / 60,
        "upscaling_speed": 100.0,
        "provider": {
            "type": "external",
            "module": module,
            "folder": str(folder),
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
    """What Ray's autoscaler calls to have machines; in its process."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str):
        super().__init__(provider_config, cluster_name)
        self._folder = Path(provider_config["folder"])
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
        there = [node for node in list(self._tags) if self.is_running(node)]
        return [node for node in there if tag_filters.items() <= self._tags[node].items()]

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
        """RuntimeError where the market has not as many, as clouds have it."""
        market = node_config["market"]
        for _ in range(count):
            taken = sum(machine.market == market for machine, _ in _running(self._folder))
            if taken >= json.loads((self._folder / THERE_IS).read_text()).get(market, 0):
                raise RuntimeError(f"InsufficientInstanceCapacity: there are no more than {taken} {market} machines")
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
        machine = asdict(Machine(node, market, time.time()))
        address = (self._folder / ADDRESS).read_text()
        what = {**machine, "address": address, "resources": dict(resources), "env": own}
        (folder / MACHINE_FILE).write_text(json.dumps(what))
        command = [sys.executable, "-m", "undula.testing.machine", str(folder)]
        self._tags[node] = {**tags, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}
        self._processes[node] = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        (folder / "pid").write_text(str(self._processes[node].pid))

    def terminate_node(self, node_id: str) -> None:
        process = self._processes[node_id]
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        rmtree(self._folder / node_id / "memory", ignore_errors=True)


def _running(folder: Path) -> list[tuple[Machine, int]]:
    """Machines whose process is running, each with the id of the process."""
    found = []
    for path in folder.glob("*/pid"):
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            pid, what = int(path.read_text()), json.loads((path.parent / MACHINE_FILE).read_text())
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append((Machine(what["node"], what["market"], what["began"]), pid))
    return found
