"""Queries to Ray's head for the nodes with their room for workers, and for the node types that the cloud has refused."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.autoscaler.v2.sdk import get_cluster_status

from undula.elastic.pure.nodes import Node, workers_that_fit
from undula.plan.fleet import MARKET, TYPE

STATUS_TIMEOUT_S = 5
"""Maximum seconds to wait for the status of the autoscaler."""
REFUSALS_INTERVAL_S = 2.0
"""Minimum seconds between two requests for this status."""


@dataclass
class Labels:
    """Cache of node labels, which queries Ray's head only when a new node appears."""

    known: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels of each node, by node id."""

    def on(self, nodes: Mapping[str, Node]) -> dict[str, Node]:
        """Return the nodes with the market and the type from their labels."""
        if not nodes.keys() <= self.known.keys():
            all_nodes: Any = ray.nodes  # Ray does not annotate this function
            self.known = {node["NodeID"]: node["Labels"] for node in all_nodes()}
        labels = {node: self.known.get(node, {}) for node in nodes}
        return {
            node.id: replace(node, market=labels[node.id].get(MARKET), type=labels[node.id].get(TYPE))
            for node in nodes.values()
        }


class BackgroundCall:
    """Runner of one call at a time in a background thread, because a call that connects to the head can take a minute."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[type["BackgroundCall"], tuple[()]]:
        return BackgroundCall, ()

    def __call__(self, call: Callable[[], None], waits: bool = False) -> bool:
        """Start a call unless the previous one is still running, or have it wait for that one. Return whether there is a call."""
        before = self._thread
        if before and before.is_alive() and not waits:
            return False
        self._thread = threading.Thread(target=self._run, args=(call, before), name="undula-background", daemon=True)
        self._thread.start()
        return True

    @staticmethod
    def _run(call: Callable[[], None], before: threading.Thread | None) -> None:
        if before:
            before.join()
        try:
            call()
        except Exception as error:  # a busy or lost head causes many kinds of errors, and the next call tries again
            logging.getLogger("undula").info("the head of the cluster did not answer: %s", error)


@dataclass
class Refusals:
    """Node types that the cloud has refused to the autoscaler, according to the newest answer of the head."""

    last: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Time of each type's newest refusal, in seconds since the epoch, and its reason."""
    _background: BackgroundCall = field(default_factory=BackgroundCall)
    _asked_at: float = float("-inf")

    def __call__(self, since: float) -> dict[str, str]:
        """Return the types that were refused since a time, each with the reason.

        The call does not wait for the head, so newer refusals appear only in a later call.
        """
        if time.monotonic() - self._asked_at >= REFUSALS_INTERVAL_S and self._background(self._ask):
            self._asked_at = time.monotonic()
        return {name: reason for name, (refused, reason) in self.last.items() if refused >= since}

    def _ask(self) -> None:
        status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=STATUS_TIMEOUT_S)
        self.last = {
            failure.ray_node_type_name: (float(failure.failed_ts_s or 0), " ".join((failure.details or "").split()))
            for failure in sorted(status.failed_launches, key=lambda failure: failure.failed_ts_s or 0)
        }


WORKERS = ("ElasticWorker", "RayTrainWorker")
"""Names of the classes of workers: those of this package and of Ray Train."""


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the resources of each node that no process has reserved, by node id."""
    state: Any = ray._private.state.state
    resources: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return resources


def workers_on_nodes() -> Counter[str]:
    """Return the number of workers of all jobs on each node, by node id."""
    state: Any = ray._private.state.state
    actors: Mapping[str, Mapping[str, Any]] = state.actor_table(None, None, "ALIVE")
    return Counter(actor["Address"]["NodeID"] for actor in actors.values() if actor["ActorClassName"] in WORKERS)


def alive_nodes(per_worker: Mapping[str, float]) -> dict[str, Node]:
    """Return the nodes that are alive, by id, with their room for workers that need `per_worker` resources."""
    state: Any = ray._private.state.state
    free, total = state.available_resources_per_node(), state.total_resources_per_node()
    draining = state.get_draining_nodes()
    deadlines = {node: deadline_ms / 1e3 if deadline_ms else float("inf") for node, deadline_ms in draining.items()}
    return {
        node: Node(node, workers_that_fit(total[node], per_worker), workers_that_fit(free[node], per_worker), deadlines.get(node))
        for node in total.keys() & free.keys()
    }  # fmt: skip
