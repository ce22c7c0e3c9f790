"""Tells what Ray Train's controller does with the workers: resizes, crashes and notices, in words."""

import logging
from collections.abc import Callable

from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller.state import (
    PreemptingState,
    ReschedulingState,
    ResizingState,
    RestartingState,
    SchedulingState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision, ScalingDecision

from undula.elastic.failures import summary
from undula.state.ledger import Event

EventSink = Callable[[Event], None]


def log_event(event: Event) -> None:
    """The sink of a trainer that was given none."""
    logging.getLogger("undula").info("%s: %s", event.kind, event.message)


class ControllerEvents(ControllerCallback):
    """Turns the controller's changes of state into events. Runs in the controller's process."""

    def __init__(self, sink: EventSink):
        self._sink = sink
        self._world_size = 0

    def after_controller_state_update(
        self, previous_state: TrainControllerState, current_state: TrainControllerState
    ) -> None:
        if isinstance(current_state, RestartingState | ReschedulingState):
            reason = summary(current_state.training_failed_error)
            self._sink(Event("crash", f"workers failed, starting again: {reason}", data={"error": reason}))
        elif isinstance(current_state, PreemptingState) and not isinstance(previous_state, PreemptingState):
            self._sink(Event("notice", "a node was told that it will go"))
        elif isinstance(current_state, ResizingState):
            size = _size(current_state.scaling_decision)
            message = f"resizing from {self._world_size} to {size} workers"
            self._sink(Event("resize", message, data={"from": self._world_size, "to": size}))
        elif isinstance(current_state, SchedulingState):
            self._world_size = _size(current_state.scaling_decision)


def _size(decision: ScalingDecision) -> int:
    assert isinstance(decision, ResizeDecision)
    return decision.num_workers
