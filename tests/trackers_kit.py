"""Helpers for tests of trackers: a tracker that keeps what it gets and fails when it is told to, and a reader of W&B's files."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from undula import TrackedRun, TrackedStep


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
        return [each.step for each in self.steps]

    def _answer(self) -> None:
        if self.hangs is not None:
            self.hangs.wait()
        if self.is_down:
            self.failures += 1
            raise ConnectionRefusedError("connection refused")


def values_by_step(folder: Path) -> list[tuple[int, dict[str, object]]]:
    """Return the values of each row of history in all files of a run, in the order of the files and of the rows in them."""
    from wandb.proto.wandb_internal_pb2 import Record

    from undula.trackers.wandb_files import HEADER_BYTES, records

    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in records(file.read_bytes(), HEADER_BYTES):
            record = Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                items = {item.nested_key[0] if item.nested_key else item.key: item for item in record.history.item}
                found.append(
                    (record.history.step.num, {key: json.loads(each.value_json) for key, each in items.items()})
                )
    return found
