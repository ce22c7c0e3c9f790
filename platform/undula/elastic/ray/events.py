"""Events for changes of Ray Train's controller and its workers, and a queue that passes events to their sink in a thread."""

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

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
from undula.elastic.ray.pooled_worker import PooledWorker
from undula.plan.fleet import MACHINE, MARKET
from undula.state.events import CrashEvent, Event, GroupEvent, NoticeEvent, WaitingEvent, WorkerPlace

EventSink = Callable[[Event], None]
NodeTable = Callable[[], list[dict[str, Any]]]
"""Function that returns the cluster's nodes in the form of ray.nodes()."""
LABELS = {
    "machine": (MACHINE,),
    "market": (MARKET, "ray.io/market-type"),
    "region": ("ray.io/availability-region",),
    "zone": ("ray.io/availability-zone",),
}
"""Node labels that may hold the value of each key of a WorkerPlace. The first label that exists is used."""


def log_event(event: Event) -> None:
    """Write an event to the logger "undula". This is the default sink of a trainer."""
    logging.getLogger("undula").info("%s: %s", event.kind, event.message)


class EventQueue:
    """Queue that passes events to a sink in order. The sink runs in a separate thread, so that slow storage does not delay a decision."""

    def __init__(self, sink: EventSink):
        self._sink = sink
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="undula-events")

    def __call__(self, event: Event) -> None:
        self._thread.submit(self._sink, event)

    def close(self) -> None:
        """Wait until the sink has received all events."""
        self._thread.shutdown()


def machines(nodes: Iterable[Mapping[str, Any]], needs: Mapping[str, float]) -> dict[str, WorkerPlace]:
    """Return the machine of each node by node id, as far as the node's labels describe it, and a worker's share of the node.

    Args:
        nodes: Nodes in the form of ray.nodes().
        needs: Amount of each resource that a worker reserves.
    """
    return {
        str(node["NodeID"]): _machine(node.get("Labels") or {}, _share(needs, node.get("Resources") or {}))
        for node in nodes
    }


def _machine(labels: Mapping[str, str], share: float | None) -> WorkerPlace:
    values: dict[str, Any] = {
        name: next((labels[key] for key in keys if labels.get(key)), None) for name, keys in LABELS.items()
    }
    place: Any = {name: value for name, value in {**values, "share": share}.items() if value}
    return cast(WorkerPlace, place)


def _share(needs: Mapping[str, float], total: Mapping[str, float]) -> float | None:
    """Return the share of a node's resources that a worker reserves, or None if the node does not have them, as one that was lost."""
    shares = [amount / total[name] for name, amount in needs.items() if amount > 0 and total.get(name)]
    return min(max(shares), 1.0) if shares else None


class ControllerEvents(ControllerCallback, WorkerGroupCallback):
    """Callback that turns the controller's changes of state into events. It runs in the controller's process.

    Args:
        sink: Sink of the events.
        needs: Amount of each resource that a worker reserves.
        nodes: Function that returns the cluster's nodes.
        waits_for_storage: Function that returns whether the last failure was one of the storage, which the run waits for.
    """

    def __init__(
        self,
        sink: EventSink,
        needs: Mapping[str, float],
        nodes: NodeTable = ray.nodes,
        waits_for_storage: Callable[[], bool] = lambda: False,
    ):
        self._sink = sink
        self._waits_for_storage = waits_for_storage
        self._needs = needs
        self._nodes = nodes
        self._job = secrets.token_hex(4)  # identifies a submission: a run holds no workers between two submissions

    def with_ready_workers(self, ready: Callable[[], list[PooledWorker]]) -> EventSink:
        """Return a sink that adds the places of the ready workers to each WaitingEvent, so that the cost of their idle time is known.

        Only the thread that sends such an event changes the pool, so these workers are the ones that the event counts.
        """

        def report(event: Event) -> None:
            if isinstance(event, WaitingEvent):
                known = machines(self._nodes(), self._needs)
                places: list[WorkerPlace] = [
                    {
                        "node": worker.node,
                        "pid": worker.metadata.pid if worker.metadata else None,
                        **known.get(worker.node, {}),
                    }
                    for worker in ready()
                ]
                event = replace(event, workers=tuple(places), job=self._job)
            self._sink(event)

        return report

    def after_worker_group_training_start(self, worker_group: WorkerGroup) -> None:
        known = machines(self._nodes(), self._needs)
        members = [worker.metadata for worker in worker_group.get_workers()]
        places: list[WorkerPlace] = [
            {
                "rank": rank,
                "node": member.node_id,
                "ip": member.node_ip,
                "pid": member.pid,
                **known.get(member.node_id, {}),
            }
            for rank, member in enumerate(members)
        ]
        self._sink(GroupEvent(tuple(places), self._job))

    def after_controller_state_update(
        self, previous_state: TrainControllerState, current_state: TrainControllerState
    ) -> None:
        if current_state is previous_state:  # the controller waits for workers
            return
        if isinstance(current_state, RestartingState | ReschedulingState):
            error = current_state.training_failed_error
            if not is_waiting(error):
                self._sink(CrashEvent("storage" if self._waits_for_storage() else "failure", summary(error)))
        elif isinstance(current_state, PreemptingState) and not isinstance(previous_state, PreemptingState):
            info = current_state.preemption_info
            deadline = None if info.deadline_ms is None else info.deadline_ms / 1e3
            for node, ranks in info.preempted_node_to_ranks.items():
                self._sink(NoticeEvent(node, tuple(ranks), deadline))
