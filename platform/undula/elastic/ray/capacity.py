"""What the cluster has room for, as Ray's head knows it this second."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.autoscaler.v2.sdk import get_cluster_status

from undula.elastic.pure.nodes import Node, workers_that_fit
from undula.plan.fleet import MARKET, TYPE

STATUS_TIMEOUT_S = 5
REFUSALS_INTERVAL_S = 2.0


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


class BackgroundCall:
    """Makes one call at a time in a thread that nobody waits for: what asks the head by name or by a new connection may take a minute."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[type["BackgroundCall"], tuple[()]]:
        return BackgroundCall, ()

    def __call__(self, call: Callable[[], None]) -> bool:
        """Whether it is being made: not while the one before is."""
        if self._thread and self._thread.is_alive():
            return False
        self._thread = threading.Thread(target=self._make, args=(call,), name="undula-aside", daemon=True)
        self._thread.start()
        return True

    @staticmethod
    def _make(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a head that is busy or gone makes of it
            logging.getLogger("undula").info("the head did not answer: %s", error)


@dataclass
class Refusals:
    """Node types of which the autoscaler could have none, as its head said when it last answered."""

    last: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Name -> when, in seconds since the epoch, and why."""
    _background: BackgroundCall = field(default_factory=BackgroundCall)
    _asked: float = float("-inf")

    def __call__(self, since: float) -> dict[str, str]:
        """Those since then, and why; what is new comes with a later call."""
        if time.monotonic() - self._asked >= REFUSALS_INTERVAL_S and self._background(self._ask):
            self._asked = time.monotonic()
        return {name: why for name, (refused, why) in self.last.items() if refused >= since}

    def _ask(self) -> None:
        status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=STATUS_TIMEOUT_S)
        self.last = {
            each.ray_node_type_name: (float(each.failed_ts_s or 0), " ".join((each.details or "").split()))
            for each in sorted(status.failed_launches, key=lambda each: each.failed_ts_s or 0)
        }


def alive_nodes(per_worker: Mapping[str, float]) -> dict[str, Node]:
    """The nodes that are alive, by id."""
    state: Any = ray._private.state.state
    free, total = state.available_resources_per_node(), state.total_resources_per_node()
    draining = state.get_draining_nodes()
    deadlines = {node: deadline_ms / 1e3 if deadline_ms else float("inf") for node, deadline_ms in draining.items()}
    return {
        node: Node(node, workers_that_fit(total[node], per_worker), workers_that_fit(free[node], per_worker), deadlines.get(node))
        for node in total.keys() & free.keys()
    }  # fmt: skip
