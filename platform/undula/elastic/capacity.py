"""What the cluster has room for, as Ray's head knows it this second."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.autoscaler.v2.sdk import get_cluster_status

from undula.plan.fleet import MARKET, TYPE

STATUS_TIMEOUT_S = 2


@dataclass(frozen=True)
class Node:
    """A node that is alive."""

    id: str
    slots: int
    """Workers that fit on it when nothing else runs there."""
    free: int
    """Workers that fit on it beside what runs there now."""
    deadline: float | None
    """When it goes, in seconds since the epoch: infinity where that is not known, None where it stays."""
    market: str | None = None
    """The value of its label MARKET."""
    type: str | None = None
    """The value of its label TYPE."""


def workers_that_fit(resources: Mapping[str, float], per_worker: Mapping[str, float]) -> int:
    """How many workers a node's resources are enough for; a worker that needs nothing fits once."""
    needs = {name: amount for name, amount in per_worker.items() if amount > 0}
    # Ray counts in units of 1e-4; 0.3 from 0.9 goes three times.
    return int(min((resources.get(name, 0.0) / amount + 1e-4 for name, amount in needs.items()), default=1))


@dataclass
class Labels:
    """Of nodes, by id; Ray's head is asked only where one is not known yet."""

    known: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def on(self, nodes: Mapping[str, Node]) -> dict[str, Node]:
        """The nodes, with what their labels say."""
        if not nodes.keys() <= self.known.keys():
            all_nodes: Any = ray.nodes  # it has no types
            self.known = {node["NodeID"]: node["Labels"] for node in all_nodes()}
        labels = {node: self.known.get(node, {}) for node in nodes}
        return {
            node.id: replace(node, market=labels[node.id].get(MARKET), type=labels[node.id].get(TYPE))
            for node in nodes.values()
        }


def refused_types(since: float) -> dict[str, str]:
    """Node types of which the autoscaler could have none since then, in seconds since the epoch, and why."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=STATUS_TIMEOUT_S)
    return {
        each.ray_node_type_name: " ".join((each.details or "").split())
        for each in status.failed_launches
        if (each.failed_ts_s or 0) >= since
    }


def look(per_worker: Mapping[str, float]) -> dict[str, Node]:
    """The nodes that are alive, by id."""
    state: Any = ray._private.state.state
    free, total = state.available_resources_per_node(), state.total_resources_per_node()
    draining = state.get_draining_nodes()
    deadlines = {node: deadline_ms / 1e3 if deadline_ms else float("inf") for node, deadline_ms in draining.items()}
    return {
        node: Node(node, workers_that_fit(total[node], per_worker), workers_that_fit(free[node], per_worker), deadlines.get(node))
        for node in total.keys() & free.keys()
    }  # fmt: skip
