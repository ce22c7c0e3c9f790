"""Tells what Ray Train's controller does with the workers: crashes and notices, in words."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import (
    PreemptingState,
    ReschedulingState,
    RestartingState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from undula.elastic.failures import is_waiting, summary
from undula.state.ledger import Event

EventSink = Callable[[Event], None]


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


class ControllerEvents(ControllerCallback, WorkerGroupCallback):
    """Turns the controller's changes of state into events. Runs in the controller's process."""

    def __init__(self, sink: EventSink):
        self._sink = sink
        self._has_begun = False

    def after_worker_group_training_start(self, worker_group: WorkerGroup) -> None:
        places: list[dict[str, Any]] = [
            {"rank": rank, "node": worker.metadata.node_id, "ip": worker.metadata.node_ip, "pid": worker.metadata.pid}
            for rank, worker in enumerate(worker_group.get_workers())
        ]
        words = ", ".join(f"rank {place['rank']} is process {place['pid']} on {place['node'][:8]}" for place in places)
        self._sink(Event("group", words, data={"workers": places, "first": not self._has_begun}))
        self._has_begun = True

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
