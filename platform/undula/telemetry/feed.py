"""Steps of a run's ledger that a tracker lacks: each step once, in order, with the values of its first commit.

A step that a crash lost is repeated, so it has several rows in the ledger. A tracker cannot replace what it has, so the first one counts,
whether it was sent before the crash or not.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from undula.state.attempts import Lineage, read_lineage
from undula.state.events import LogEvent, ValidationEvent
from undula.state.ledger import events_of
from undula.state.ledger_files import EVENTS, STEPS, read_files, union
from undula.storage import Store
from undula.telemetry.tracker import TrackedStep

MOST_STEPS = 100
"""Maximum number of steps that are sent at once."""


class Feed:
    """Reader of a growing ledger for one tracker.

    Args:
        store: Run directory.
        newest: Number of the newest step that the tracker has; None if it has none.
    """

    def __init__(self, store: Store, newest: int | None):
        self._store = store
        self.newest = -1 if newest is None else newest
        """Number of the newest step that the tracker has; -1 if it has none."""
        self.events = EVENTS.file_schema.empty_table()
        """All events so far."""
        self._rows = STEPS.file_schema.empty_table()
        """Rows of the steps that the tracker lacks, in order."""
        self._between: dict[int, dict[str, float]] = {}
        """Values that were recorded first after each number of steps: means of a validation, and what the script logged between steps."""
        self._known: set[str] = set()

    def read(self) -> None:
        """Read the files of the ledger that are new.

        Raises:
            StorageError: The ledger cannot be read.
        """
        files = read_files(self._store, self._known)
        steps, events = ([table for name, table in files.items() if kind.includes(name)] for kind in (STEPS, EVENTS))
        if steps:
            # An attempt begins before it writes a row, so the lineage that is read after the rows includes their attempts.
            self._rows = first_commits(union(STEPS, [self._rows, *steps]), read_lineage(self._store), self.newest)
        if events:
            self.events = union(EVENTS, [self.events, *events]).sort_by("time")
            self._record(union(EVENTS, events).sort_by("time"))
        self._known |= files.keys()

    def _record(self, events: pa.Table) -> None:
        recorded: list[ValidationEvent | LogEvent] = [*events_of(events, ValidationEvent), *events_of(events, LogEvent)]
        for event in recorded:
            if event.step > self.newest:
                between = self._between.setdefault(event.step, {})
                between |= _named(event) | between  # the first value of a name counts

    def due(self, is_over: bool) -> list[TrackedStep]:
        """Return the next steps to send; empty if there are none now.

        The newest step is held back until the next one is in the ledger, because what is recorded until then belongs to it.

        Args:
            is_over: Whether the ledger was complete when it was read last.
        """
        rows = self._rows.slice(0, min(max(len(self._rows) - (not is_over), 0), MOST_STEPS)).to_pylist()
        steps, done = [], max(self.newest, 0)
        if self.newest < 0 and rows and self._between.get(0):
            steps.append(TrackedStep(0, rows[0]["time"], self._between[0]))
        for row in rows:
            before, done = done, row["step"] + (row["merged_steps"] or 1)
            values = _values(row)
            for step in range(before + 1, done + 1):
                values |= self._between.get(step, {})
            steps.append(TrackedStep(done, row["time"], values))
        return steps

    def sent(self, steps: Sequence[TrackedStep]) -> None:
        """Count steps as sent."""
        self.newest = steps[-1].step
        self._rows = self._rows.filter(pa.array(_done(self._rows) > self.newest))
        self._between = {step: values for step, values in self._between.items() if step > self.newest}


def first_commits(rows: pa.Table, lineage: Lineage, newest: int) -> pa.Table:
    """Return the rows of the steps after `newest`, ordered by step, each as it was committed first.

    With an elastic batch, a repeated step may end elsewhere than before. A row then counts if it ends after all rows of former attempts.

    Args:
        rows: Rows of the ledger, each once.
        lineage: Attempts that belong to the run.
        newest: Number of committed steps at the end of the last row before those that are returned.
    """
    attempts = rows["attempt"].to_numpy()
    own = [attempt for attempt in np.unique(attempts).tolist() if lineage.includes(attempt)]
    rows = rows.filter(pa.array(np.isin(attempts, own)))
    done = _done(rows)
    order = np.lexsort((done, rows["attempt"].to_numpy()))
    done = done[order]
    before = np.maximum.accumulate(np.concatenate([[newest], done]))[:-1]
    return rows.take(pa.array(order[done > before]))


def _done(rows: pa.Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of committed steps after each row; shape [rows]."""
    merged = pc.fill_null(rows["merged_steps"], 1)
    return np.asarray(pc.add(rows["step"], pc.cast(merged, pa.int64())).to_numpy(), dtype=np.int64)


def _named(event: ValidationEvent | LogEvent) -> dict[str, float]:
    """Return the values of an event by the names that trackers show."""
    if isinstance(event, ValidationEvent):
        return {f"{name}/validation": value for name, value in event.means.items()}
    return {f"logged/{name}": float(value) for name, value in event.values.items()}


def _values(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a step by the names that trackers show."""
    seconds = sum(row[f"{name}_s"] or 0.0 for name in ("data", "transfer", "compute", "communication", "other"))
    values = {
        "loss/train": row["loss"],
        "lr": row["lr"],
        "samples_per_s": row["step_samples"] / max(seconds, 1e-9),
        "samples": row["samples"],
        "epoch": row["epoch"],
        "world_size": row["world_size"],
        "grad_norm": row["grad_norm"],
        **{f"logged/{name}": value for name, value in json.loads(row["logged"] or "{}").items()},
    }
    return {name: float(value) for name, value in values.items() if value is not None}
