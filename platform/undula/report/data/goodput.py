"""Goodput of a run. Every second of every rank that the run held counts in exactly one class. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa

from undula.state.events import Event, GroupEvent, WaitingEvent, WorkerPlace
from undula.state.ledger import Ledger

CLASSES = ("useful", "replayed", "restarting", "checkpoint", "data", "capacity")
"""Classes of rank-seconds: committed steps; steps that were lost and replayed; start and shutdown of workers; blocked on a checkpoint;
waiting for data; waiting for capacity."""
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Goodput:
    """Rank-seconds of a run by CLASSES. They add up to all the time that ranks were held."""

    seconds: Mapping[str, float]

    @property
    def held_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Useful share of the rank-seconds; 0 if none were held."""
        return self.seconds["useful"] / self.held_s if self.held_s else 0.0


@dataclass(frozen=True)
class Allocation:
    """A set of workers that the run held for a period, and how they spent it."""

    workers: tuple[WorkerPlace, ...]
    """Node, process and machine of each worker, from the event at the start of the period."""
    seconds: Mapping[str, float]
    """Seconds of each worker, by CLASSES. Classes without seconds may be missing."""


def goodput(ledger: Ledger, events: Sequence[Event]) -> Goodput:
    """Return the goodput of a run, from its first worker to the newest entry of its ledger."""
    seconds = dict.fromkeys(CLASSES, 0.0)
    for allocation in allocations(ledger, events):
        for name, spent in allocation.seconds.items():
            seconds[name] += spent * len(allocation.workers)
    return Goodput(seconds)


def allocations(ledger: Ledger, events: Sequence[Event]) -> Iterator[Allocation]:
    """Yield the allocations of a run in order of time.

    A group of W workers holds W ranks until the next group starts. From a "waiting" event on, the run holds the workers that were ready
    at that time. The time between the first and the last step of a group counts as work, except for the waits that the steps recorded.
    """
    rows = _rows(ledger)
    times = np.sort([*(event.time for event in events), *rows["time"].tolist()])
    starts = [event for event in events if isinstance(event, GroupEvent | WaitingEvent)]
    for start, following in zip_longest(starts, starts[1:]):
        end = _end(start, following, times)
        if isinstance(start, WaitingEvent):
            yield Allocation(_ready_workers(start), {"capacity": end - start.time})
        else:
            own = (rows["time"] > start.time) & (rows["time"] <= end)
            spent = _spent_by_rank({name: values[own] for name, values in rows.items()}, end - start.time)
            yield Allocation(start.workers, spent)


def _ready_workers(waiting: WaitingEvent) -> tuple[WorkerPlace, ...]:
    """Return the workers that were ready. An older ledger records only their number, so their entries are empty."""
    unknown: WorkerPlace = {}
    return waiting.workers or (unknown,) * waiting.ready


def _end(start: GroupEvent | WaitingEvent, following: GroupEvent | WaitingEvent | None, times: Floats) -> float:
    """Return the time at which an allocation ended.

    This is the start of the next allocation or, if that belongs to a later submission of the job, the last entry before it.
    """
    if following is None:
        return float(times[-1])
    is_another_job = following.job != start.job
    return float(times[times < following.time].max(initial=start.time)) if is_another_job else following.time


def _spent_by_rank(rows: Mapping[str, Floats], held_s: float) -> dict[str, float]:
    """Return the seconds of one rank of a group by class; `rows` are the steps of the group."""
    if not len(rows["time"]):
        return {"restarting": held_s}
    work_s = float(rows["time"][-1] - rows["time"][0] + rows["step_s"][0])
    data_s, checkpoint_s = float(rows["data_s"].sum()), float(rows["blocked_s"].sum())
    replayed_s = float(((rows["step_s"] - rows["data_s"]) * rows["is_replayed"]).sum())
    return {
        "useful": work_s - data_s - checkpoint_s - replayed_s,
        "replayed": replayed_s,
        "data": data_s,
        "checkpoint": checkpoint_s,
        "restarting": held_s - work_s,
    }


def _rows(ledger: Ledger) -> dict[str, Floats]:
    """Return columns of all steps in order of time. `is_replayed` is 1 for steps that a later attempt replayed, and 0 for the others."""
    parts = [(ledger.steps, 0.0), (ledger.replaced, 1.0)]
    columns = {
        name: np.concatenate([_column(table, name) for table, _ in parts]) for name in ("time", "data_s", "blocked_s")
    }
    step_s = [
        sum(_column(table, f"{name}_s") for name in ("data", "transfer", "compute", "communication", "other"))
        for table, _ in parts
    ]
    columns["step_s"] = np.concatenate([np.asarray(values, dtype=np.float64) for values in step_s])
    columns["is_replayed"] = np.concatenate([np.full(len(table), is_replayed) for table, is_replayed in parts])
    order = np.argsort(columns["time"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def _column(table: pa.Table, name: str) -> Floats:
    """Return a column with 0 for null, or zeros if an older ledger lacks the column."""
    if name not in table.column_names:
        return np.zeros(len(table))
    values: Floats = table[name].fill_null(0.0).to_numpy().astype(np.float64)
    return values
