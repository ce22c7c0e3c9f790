"""Goodput: every second that every rank was held, in exactly one class. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa

from undula.state.events import Event, GroupEvent, WaitingEvent, WorkerPlace
from undula.state.ledger import Ledger

CLASSES = ("useful", "replayed", "restarting", "checkpoint", "data", "capacity")
"""Work that stands; work that was done again; starting, and falling out of step; held up by a checkpoint; waiting for data; waiting
for capacity."""
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Goodput:
    """Rank-seconds of a run by class of CLASSES; they add up to what was held."""

    seconds: Mapping[str, float]

    @property
    def held_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Useful seconds over all that were held; 0 of nothing."""
        return self.seconds["useful"] / self.held_s if self.held_s else 0.0


@dataclass(frozen=True)
class Hold:
    """Workers that were held together for a while, and where it went."""

    workers: tuple[WorkerPlace, ...]
    """As the event that began it names them: where they ran, and on which machine."""
    seconds: Mapping[str, float]
    """Of each of them, by class of CLASSES; a class of none may be left out."""


def goodput(ledger: Ledger, events: Sequence[Event]) -> Goodput:
    """The goodput of a run, from the first workers that were held to the last thing that was told."""
    seconds = dict.fromkeys(CLASSES, 0.0)
    for hold in holds(ledger, events):
        for name, spent in hold.seconds.items():
            seconds[name] += spent * len(hold.workers)
    return Goodput(seconds)


def holds(ledger: Ledger, events: Sequence[Event]) -> Iterator[Hold]:
    """Who was held when, in order of time.

    A group of W workers holds W ranks from its start to the next group's start; from when "waiting" was told, as many as were ready then.
    Within a group, what lies between its first step and its last is work, but for what the rows say of data and checkpoints.
    """
    rows = _rows(ledger)
    times = np.sort([*(event.time for event in events), *rows["time"].tolist()])
    marks = [event for event in events if isinstance(event, GroupEvent | WaitingEvent)]
    for mark, following in zip_longest(marks, marks[1:]):
        end = _end(mark, following, times)
        if isinstance(mark, WaitingEvent):
            yield Hold(_ready(mark), {"capacity": end - mark.time})
        else:
            own = (rows["time"] > mark.time) & (rows["time"] <= end)
            spent = _of_group({name: values[own] for name, values in rows.items()}, end - mark.time)
            yield Hold(mark.workers, spent)


def _ready(waiting: WaitingEvent) -> tuple[WorkerPlace, ...]:
    """The workers that were held; nothing but their number where an older ledger does not say which."""
    unknown: WorkerPlace = {}
    return waiting.workers or (unknown,) * waiting.ready


def _end(mark: GroupEvent | WaitingEvent, following: GroupEvent | WaitingEvent | None, times: Floats) -> float:
    """When workers were given up: as the next ones were told of, or by the last word of a job that was submitted again since."""
    if following is None:
        return float(times[-1])
    is_another_job = following.job != mark.job
    return float(times[times < following.time].max(initial=mark.time)) if is_another_job else following.time


def _of_group(rows: Mapping[str, Floats], held_s: float) -> dict[str, float]:
    """The seconds of one rank of a group by class."""
    if not len(rows["time"]):
        return {"restarting": held_s}
    work_s = float(rows["time"][-1] - rows["time"][0] + rows["step_s"][0])
    data_s, checkpoint_s = float(rows["data_s"].sum()), float(rows["blocked_s"].sum())
    replayed_s = float(((rows["step_s"] - rows["data_s"]) * (1 - rows["stands"])).sum())
    useful_s = work_s - data_s - checkpoint_s - replayed_s
    return {
        "useful": useful_s,
        "replayed": replayed_s,
        "data": data_s,
        "checkpoint": checkpoint_s,
        "restarting": held_s - work_s,
    }


def _rows(ledger: Ledger) -> dict[str, Floats]:
    """Columns of all steps that were done, in order of time; of those that were done again, `stands` is 0."""
    parts = [(ledger.steps, 1.0), (ledger.replaced, 0.0)]
    columns = {
        name: np.concatenate([_column(table, name) for table, _ in parts]) for name in ("time", "data_s", "blocked_s")
    }
    step_s = [
        sum(_column(table, f"{name}_s") for name in ("data", "compute", "communication", "other")) for table, _ in parts
    ]
    columns["step_s"] = np.concatenate([np.asarray(values, dtype=np.float64) for values in step_s])
    columns["stands"] = np.concatenate([np.full(len(table), stands) for table, stands in parts])
    order = np.argsort(columns["time"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def _column(table: pa.Table, name: str) -> Floats:
    """A column without nulls; of zeros where an older ledger has none."""
    if name not in table.column_names:
        return np.zeros(len(table))
    values: Floats = table[name].fill_null(0.0).to_numpy().astype(np.float64)
    return values
