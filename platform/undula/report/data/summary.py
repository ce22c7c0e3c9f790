"""Summary of a run: the figures that the terminal and the report show, computed from the ledger. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from undula.report.data.estimates import Estimates, estimates_of
from undula.report.data.goodput import goodput
from undula.report.data.run_record import JobRecord
from undula.state.events import Event, FailEvent, GroupEvent, StartEvent, ValidationEvent, WaitingEvent
from undula.state.ledger import Ledger, decode_events, steps_done
from undula.state.records import PARTS

RUNNING_WITHIN_S = 60.0
"""Maximum age in seconds of the newest ledger entry of a run that counts as running although it has no heartbeat."""
TRAINING_LOSS_STEPS = 20
"""Number of steps over which the training loss is averaged."""
TURNS = ("start", "stop", "fail", "end")
"""Kinds of events that decide the state of a run."""
SECONDS_CLASSES = ("compute", "communication", "data", "transfer", "other")
"""Classes in which the ledger divides the seconds of a step."""

State = Literal["finished", "failed", "running", "stopped", "pending"]
"""State of a run; `pending` if a cluster has its job and has not started the driver yet, which a ledger does not tell."""
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class ValidationPoint:
    """Validation loss and the time of its measurement."""

    step: int
    """Number of committed steps."""
    loss: float
    time: float
    """Time of the measurement in seconds since the epoch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other means of the validation, by name."""


@dataclass(frozen=True)
class RunSummary:
    """Figures of a run. Figures that do not exist yet are None."""

    name: str
    state: State
    steps: int
    """Number of committed steps."""
    total_steps: int
    """Number of steps of the whole plan."""
    samples: int
    """Number of samples of the committed steps."""
    total_samples: int
    """Number of samples of the whole plan."""
    first_validation_loss: float | None
    last_validation_loss: float | None
    best_validation_loss: float | None
    """Lowest finite validation loss."""
    best_validation_step: int | None
    training_loss: float | None
    """Mean loss of the last TRAINING_LOSS_STEPS committed steps."""
    samples_per_s: float | None
    """Median throughput of the committed steps in samples per second."""
    began: float | None
    """Time of the first event or step, in seconds since the epoch."""
    latest: float | None
    """Time of the newest event or step, in seconds since the epoch."""
    wall_s: float
    """Wall time from `began` to `latest` in seconds."""
    replayed_steps: int
    """Number of steps in the ledger that were replayed. Steps that were lost before the ledger had them are not counted."""
    skipped_steps: int
    """Number of committed steps that left the weights as they were, because a gradient overflowed in fp16."""
    attempts: int
    crashes: int
    resizes: int
    checkpoints: int
    world_sizes: tuple[int, ...]
    """World sizes of the run in ascending order."""
    seconds: Mapping[str, float]
    """Seconds of the committed steps by SECONDS_CLASSES; for each step, the mean over ranks."""
    rank_seconds: Mapping[str, float]
    """Rank-seconds of the whole run, by the classes of `undula.report.data.goodput`."""
    goodput: float
    """Useful share of the rank-seconds."""
    validation_metrics: Mapping[str, float] = field(default_factory=dict)
    """Other means of the last validation, by name."""
    failure: str | None = None
    """Error with which training failed, if the run is in that state."""
    waiting: str | None = None
    """What the run waits for, if it runs and waits for workers."""
    estimates: Estimates | None = None
    """What was expected of the run before it began, beside what was measured."""
    sharding_stage: int = 0
    """Value of sharding.stage in the newest submission."""

    def as_json(self) -> dict[str, Any]:
        """Return the summary as a JSON object. Losses that are not finite become null."""
        tree: dict[str, Any] = without_nan(asdict(self))
        return tree


def stage_of(job: JobRecord) -> int:
    """Return the value of sharding.stage in the newest submission of a run."""
    return int(job.spec.get("sharding", {}).get("stage", 0))


def summarize(ledger: Ledger, job: JobRecord, now: float, has_driver: bool | None = None) -> RunSummary:
    """Return the summary of a run.

    Args:
        ledger: Ledger of the run.
        job: The job as it was submitted.
        now: Time in seconds since the epoch.
        has_driver: Whether a driver is training the run; None if that is unknown.
    """
    events = decode_events(ledger.events)
    steps = ledger.steps
    kinds = [event.kind for event in events]
    times = [event.time for event in events] + column(steps, "time")[-1:].tolist()
    losses = validations(events)
    best = min((point for point in losses if math.isfinite(point.loss)), key=lambda point: point.loss, default=None)
    rate = throughput(steps)
    sizes = {*steps["world_size"].to_pylist(), *ledger.replaced["world_size"].to_pylist()}
    spent = goodput(ledger, events)
    state = _state(kinds, max(times, default=None), now, has_driver)
    turn = next((event for event in reversed(events) if event.kind in TURNS), None)
    group = next((event for event in reversed(events) if isinstance(event, GroupEvent | WaitingEvent)), None)
    return RunSummary(
        name=job.name,
        state=state,
        steps=steps_done(steps),
        total_steps=job.total_steps,
        samples=int(steps["samples"][-1].as_py()) if len(steps) else 0,
        total_samples=job.total_samples,
        first_validation_loss=losses[0].loss if losses else None,
        last_validation_loss=losses[-1].loss if losses else None,
        best_validation_loss=best.loss if best else None,
        best_validation_step=best.step if best else None,
        training_loss=float(column(steps, "loss")[-TRAINING_LOSS_STEPS:].mean()) if len(steps) else None,
        samples_per_s=float(np.median(rate)) if len(rate) else None,
        began=min(times, default=None),
        latest=max(times, default=None),
        wall_s=max(times) - min(times) if times else 0.0,
        replayed_steps=len(ledger.replaced),
        skipped_steps=int((column(steps, "applied") == 0).sum()),
        attempts=kinds.count("start"),
        crashes=kinds.count("crash"),
        resizes=kinds.count("resize"),
        checkpoints=kinds.count("checkpoint"),
        world_sizes=tuple(sorted(int(size) for size in sizes)),
        seconds={name: float(np.nansum(column(steps, f"{name}_s"))) for name in SECONDS_CLASSES},
        rank_seconds=spent.seconds,
        goodput=spent.share,
        validation_metrics=losses[-1].metrics if losses else {},
        failure=turn.error if isinstance(turn, FailEvent) and state == "failed" else None,
        waiting=group.message if isinstance(group, WaitingEvent) and state == "running" else None,
        estimates=estimates_of(events, steps),
        sharding_stage=stage_of(job),
    )


def validations(events: Sequence[Event]) -> tuple[ValidationPoint, ...]:
    """Return the validations of a run by step. If a later attempt replayed a step, only its validation is returned."""
    points: dict[int, ValidationPoint] = {}
    for event in events:
        if isinstance(event, StartEvent):
            points = {step: entry for step, entry in points.items() if step <= event.step}
        elif isinstance(event, ValidationEvent):
            points[event.step] = ValidationPoint(event.step, event.loss, event.time, event.metrics)
    return tuple(points[step] for step in sorted(points))


def column(table: pa.Table, name: str) -> Floats:
    """Return a column as float64, with NaN for null."""
    return np.asarray(table[name].to_numpy(), dtype=np.float64)


def throughput(steps: pa.Table) -> Floats:
    """Return the samples per second of each step; shape [steps]."""
    seconds = np.nansum([column(steps, name) for name in PARTS], axis=0)
    rate: Floats = column(steps, "step_samples") / np.maximum(seconds, 1e-9)
    return rate


def without_nan(tree: Any) -> Any:
    """Return the tree with None in place of numbers that are not finite, which JSON does not support."""
    if isinstance(tree, Mapping):
        return {key: without_nan(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_nan(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _state(kinds: Sequence[str], latest: float | None, now: float, has_driver: bool | None = None) -> State:
    """Return the state of a run. Its ledger has no new entry while it waits for capacity, validates, or takes a long step."""
    last = next((kind for kind in reversed(kinds) if kind in TURNS), None)
    if last == "end":
        return "finished"
    is_recent = latest is not None and now - latest < RUNNING_WITHIN_S and last not in ("stop", "fail")
    if is_recent if has_driver is None else has_driver:
        return "running"
    return "failed" if last == "fail" else "stopped"
