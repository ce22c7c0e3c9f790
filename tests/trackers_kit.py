"""Helpers for tests of trackers: one that keeps what it gets and fails on request, a followed ledger, and readers of trackers' files."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ledger_rows import Rows

from undula import TrackedRun, TrackedStep, Tracker
from undula.state.ledger import Ledger, read_ledger
from undula.storage import Store
from undula.telemetry.follower import Follower

RUN = TrackedRun("0123abcd", "run", "/runs/run", 0.0, {"plan.seed": "0"})
TAGS = {"undula.plan_digest": "77", "job.workers.max": "2"}


@dataclass
class KeptTracker:
    """Tracker that keeps steps in memory, and implements the protocol without inheriting from it."""

    name: str = "kept"
    steps: list[TrackedStep] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    runs: list[TrackedRun] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    is_down: bool = False
    failures: int = 0
    """Number of calls that failed because the tracker was down."""
    stores_before_failing: int = 0
    """Number of steps of the next request that are stored although the request fails."""
    hangs: threading.Event | None = None
    """Event for which each request waits."""

    def open(self, run: TrackedRun) -> int | None:
        self._answer()
        self.runs.append(run)
        return self.steps[-1].step if self.steps else None

    def send(self, steps: Sequence[TrackedStep]) -> None:
        if self.stores_before_failing:
            self.steps += steps[: self.stores_before_failing]
            self.stores_before_failing = 0
            raise TimeoutError("the answer was lost")
        self._answer()
        self.steps += steps

    def describe(self, tags: Mapping[str, str]) -> None:
        self._answer()
        self.tags.update(tags)

    def close(self, state: str) -> None:
        self._answer()
        self.states.append(state)

    @property
    def numbers(self) -> list[int]:
        return [step.step for step in self.steps]

    def _answer(self) -> None:
        if self.hangs is not None:
            self.hangs.wait()
        if self.is_down:
            self.failures += 1
            raise ConnectionRefusedError("connection refused")


class Followed:
    """Ledger and a follower of it that has started.

    Args:
        store: Run directory.
        tracker: Tracker that gets the steps.
        rows: Writer of the ledger, if another driver has begun it.
        run: Run as the tracker shows it.
    """

    def __init__(self, store: Store, tracker: Tracker, rows: Rows | None = None, run: TrackedRun = RUN):
        self.rows = rows or Rows(store)
        self.reports: list[tuple[str, str, int | None]] = []
        """Name of the tracker, type of its problem, and its newest step, at the beginning and the end of each outage."""
        self.follower = Follower(tracker, lambda: run, store, lambda events: TAGS, self._report, interval_s=0.01)
        self.follower.start()

    def _report(self, follower: Follower) -> None:
        self.reports.append((follower.name, type(follower.problem).__name__, follower.newest))

    def end(self, limit_s: float = 120.0) -> bool:
        """End the training, and return whether everything was sent within the limit."""
        self.follower.end_training()
        return self.follower.wait(limit_s)


def first_commits(ledger: Ledger) -> dict[int, dict[str, Any]]:
    """Return the row of the first commit of each step, by the number of committed steps."""
    rows = [*ledger.steps.to_pylist(), *ledger.replaced.to_pylist()]
    return {row["step"] + 1: row for row in sorted(rows, key=lambda row: row["attempt"], reverse=True)}


def on_tensorboard(store: Store, name: str = "loss/train") -> list[tuple[int, float]]:
    """Return the steps and values that TensorBoard shows of a scalar of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(store.path("tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    return [(point.step, point.value) for point in board.Scalars(name)]


def assert_on_tensorboard(store: Store) -> None:
    """Check that TensorBoard shows the loss of each step of a run once, as it was committed first."""
    commits = sorted(first_commits(read_ledger(store)).items())
    points = on_tensorboard(store)
    assert [step for step, _ in points] == [step for step, _ in commits]
    assert [loss for _, loss in points] == pytest.approx([row["loss"] for _, row in commits], rel=1e-6)


def values_by_step(folder: Path) -> list[tuple[int, dict[str, object]]]:
    """Return the values of each row of history in all files of a run, in the order of the files and of the rows in them."""
    from wandb.proto.wandb_internal_pb2 import Record

    from undula.telemetry.trackers.wandb import HEADER_BYTES, records

    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in records(file.read_bytes(), HEADER_BYTES):
            record = Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                items = {item.nested_key[0] if item.nested_key else item.key: item for item in record.history.item}
                values = {key: json.loads(item.value_json) for key, item in items.items()}
                rows.append((record.history.step.num, values))
    return rows
