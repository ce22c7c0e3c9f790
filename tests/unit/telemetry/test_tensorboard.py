"""Tests of TensorBoard's files: TensorBoard shows each step once and in order, through killed drivers and failures of the storage."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ledger_rows import Rows
from trackers_kit import RUN, Followed, on_tensorboard
from waiting import wait_until

from undula.errors import StorageError
from undula.state.events import LogEvent, ValidationEvent
from undula.storage import Store
from undula.telemetry.tracker import TrackedStep
from undula.telemetry.trackers import tensorboard
from undula.telemetry.trackers.tensorboard import TensorBoardTracker


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def send(tracker: TensorBoardTracker, steps: range) -> None:
    tracker.send([TrackedStep(step, float(step), {"loss/train": float(step)}) for step in steps])


def numbered(steps: range) -> list[tuple[int, float]]:
    return [(step, float(step)) for step in steps]


def test_values_have_the_names_steps_and_times_of_the_ledger(store: Store) -> None:
    followed = Followed(store, TensorBoardTracker(store))
    followed.rows.events.append(ValidationEvent(9.0, 1, {"accuracy": 0.5}, step=0).row())
    followed.rows.events.append(LogEvent({"f1": 0.25}, step=2).row())
    followed.rows.add(3)
    assert followed.end()
    assert on_tensorboard(store) == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert on_tensorboard(store, "loss/validation") == [(0, 9.0)]
    assert on_tensorboard(store, "accuracy/validation") == [(0, 0.5)]
    assert on_tensorboard(store, "logged/f1") == [(2, 0.25)]
    assert dict(on_tensorboard(store, "samples_per_s")) == pytest.approx({1: 40.0, 2: 40.0, 3: 40.0})
    assert [value for _, value in on_tensorboard(store, "lr")] == pytest.approx([0.1] * 3)


def test_files_have_a_bounded_size_and_are_read_in_order(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "FILE_BYTES", 1000)
    tracker = TensorBoardTracker(store)
    assert tracker.open(RUN) is None
    for step in range(1, 301):
        send(tracker, range(step, step + 1))
    sizes = [entry.bytes for entry in store.list("tensorboard")]
    assert len(sizes) > 10  # TensorBoard orders files by name
    assert max(sizes) < 1100
    assert on_tensorboard(store) == numbered(range(1, 301))
    assert TensorBoardTracker(store).open(RUN) == 300


@pytest.mark.parametrize("former", [None, "events.out.tfevents.1700000000.host.a1.0"], ids=["driver", "former-version"])
def test_the_next_driver_goes_on_after_the_files_of_a_killed_one(store: Store, former: str | None) -> None:
    Rows(store).add(6)
    killed = TensorBoardTracker(store)
    killed.open(RUN)
    send(killed, range(1, 6))
    (name,) = store.names("tensorboard")
    content = store.read(f"tensorboard/{name}")
    store.delete(f"tensorboard/{name}")
    store.write(f"tensorboard/{former or name}", content)
    store.write(f"tensorboard/.{name}.0123.partial", content[:-3])  # torn by the kill
    replayed = Rows(store, attempt=2)
    replayed.count = 3
    replayed.add(6)
    for _ in range(2):  # for the second one, nothing is left to send
        assert Followed(store, TensorBoardTracker(store), replayed).end()
        assert [step for step, _ in on_tensorboard(store)] == list(range(1, 10))
        assert len(store.names("tensorboard")) == 2


def test_a_driver_that_another_one_has_replaced_shows_no_step_twice(store: Store) -> None:
    """On S3, a job on another cluster takes the run over, and the former driver may write until it notices."""
    former, tracker = TensorBoardTracker(store), TensorBoardTracker(store)
    former.open(RUN)
    send(former, range(1, 6))
    assert tracker.open(RUN) == 5
    send(former, range(6, 9))
    send(tracker, range(6, 12))
    assert on_tensorboard(store) == numbered(range(1, 12))


@dataclass(frozen=True)
class FailingStore(Store):
    """Store whose next writes of event files fail, some of them although they were carried out."""

    failures: list[bool] = field(default_factory=list)
    """Whether each of these writes is carried out."""

    def write(self, name: str, data: bytes) -> None:
        fails = bool(self.failures)
        if not fails or self.failures.pop():
            super().write(name, data)
        if fails:
            raise StorageError("no space left on the device")


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_failure_of_the_storage_loses_and_repeats_no_step(store: Store, is_stored: bool) -> None:
    failing = FailingStore(store.url, failures=[is_stored] * 3)
    followed = Followed(store, TensorBoardTracker(failing))
    followed.rows.add(50)
    wait_until(lambda: len(followed.reports) >= 2)
    followed.rows.add(50)
    assert followed.end()
    assert [step for step, _ in on_tensorboard(store)] == list(range(1, 101))
    problems = [problem for _, problem, _ in followed.reports]
    # After a failure that was carried out, the files have all steps so far, so that a later failure is an outage of its own.
    # The last one may be noticed only at the end, which then needs no report: all steps have arrived.
    assert problems == (["StorageError", "NoneType"] * len(problems))[: len(problems)]
