"""Tells what Ray Train's controller does with the workers: crashes and notices, in words."""

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import (
    PreemptingState,
    ReschedulingState,
    RestartingState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from undula.elastic.ray.failures import is_waiting, summary
from undula.elastic.ray.pool import PooledWorker
from undula.plan.fleet import MACHINE, MARKET
from undula.state.records import Event

EventSink = Callable[[Event], None]
NodeTable = Callable[[], list[dict[str, Any]]]
"""As ray.nodes."""
LABELS = {
    "machine": (MACHINE,),
    "market": (MARKET, "ray.io/market-type"),
    "region": ("ray.io/availability-region",),
    "zone": ("ray.io/availability-zone",),
}
"""What an event says of a worker's machine, and the node's labels that it is from, the first one that is there."""


def log_event(event: Event) -> None:
    """The sink of a trainer that was given none."""
    logging.getLogger("undula").info("%s: %s", event.kind, event.message)


class EventQueue:
    """Hands events to a sink in a thread, in order: one that writes to a slow storage must not hold up a decision."""

    def __init__(self, sink: EventSink):
        self._sink = sink
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="undula-events")

    def __call__(self, event: Event) -> None:
        self._thread.submit(self._sink, event)

    def close(self) -> None:
        """Wait until all are told."""
        self._thread.shutdown()


def machines(nodes: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """By node id: what the node's labels say of its machine; nothing where they say nothing."""
    found = {}
    for node in nodes:
        labels = node.get("Labels") or {}
        told = (
            (name, next((labels[each] for each in keys if labels.get(each)), None)) for name, keys in LABELS.items()
        )
        found[str(node["NodeID"])] = {name: value for name, value in told if value}
    return found


class ControllerEvents(ControllerCallback, WorkerGroupCallback):
    """Turns the controller's changes of state into events. Runs in the controller's process."""

    def __init__(self, sink: EventSink, nodes: NodeTable = ray.nodes):
        self._sink = sink
        self._nodes = nodes
        self._job = secrets.token_hex(4)  # of one submission: between two of them nobody is held

    def naming_ready(self, ready: Callable[[], list[PooledWorker]]) -> EventSink:
        """A sink whose "waiting" events say which workers are ready, and on which machines, so that their idle time has a price.

        Such an event is told in the moment in which they were counted, by the thread that alone changes the pool: so they are the same.
        """

        def tell(event: Event) -> None:
            if event.kind == "waiting":
                kinds = machines(self._nodes())
                places = [
                    {"node": each.node, "pid": each.metadata.pid if each.metadata else None, **kinds.get(each.node, {})}
                    for each in ready()
                ]
                event = replace(event, data={**event.data, "workers": places, "job": self._job})
            self._sink(event)

        return tell

    def after_worker_group_training_start(self, worker_group: WorkerGroup) -> None:
        kinds = machines(self._nodes())
        members = [worker.metadata for worker in worker_group.get_workers()]
        places: list[dict[str, Any]] = [
            {"rank": rank, "node": each.node_id, "ip": each.node_ip, "pid": each.pid, **kinds.get(each.node_id, {})}
            for rank, each in enumerate(members)
        ]
        words = ", ".join(f"rank {place['rank']} is process {place['pid']} on {place['node'][:8]}" for place in places)
        self._sink(Event("group", words, data={"workers": places, "job": self._job}))

    def after_controller_state_update(
        self, previous_state: TrainControllerState, current_state: TrainControllerState
    ) -> None:
        if isinstance(current_state, RestartingState | ReschedulingState):
            error = current_state.training_failed_error
            if not is_waiting(error):
                reason = summary(error)
                self._sink(Event("crash", f"workers failed, starting again: {reason}", data={"error": reason}))
        elif isinstance(current_state, PreemptingState) and not isinstance(previous_state, PreemptingState):
            self._sink(Event("notice", "a node was told that it will go"))
