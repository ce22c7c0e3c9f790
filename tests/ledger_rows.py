"""Rows of ledgers for tests."""

from collections.abc import Iterable

from undula.state.events import LossEvent, StartEvent
from undula.state.ledger import Ledger, LedgerWriter, RowWriter, decode_events, read_ledger
from undula.state.ledger_files import EVENTS, STEPS
from undula.state.records import StepRow
from undula.storage import Store


def step_row(attempt: int, step: int) -> StepRow:
    return StepRow(
        attempt=attempt, step=step, epoch=0, samples=4 * (step + 1), step_samples=4, world_size=1, loss=1.0, lr=0.1,
        data_s=0.0, compute_s=0.1, communication_s=0.0, other_s=0.0, sample_digest=2**64 - 1, time=0.0,
    )  # fmt: skip


def write_attempt(store: Store, attempt: int, steps: Iterable[int], start: StartEvent | None = None) -> None:
    """Write the rows of an attempt, whose writer is then closed."""
    writer = LedgerWriter(store, attempt)
    if start:
        writer.event(start)
    for step in steps:
        writer.step(step_row(attempt, step))
    writer.close()


def write_two_attempts(store: Store) -> None:
    """Write the steps 0 to 4 of attempt 1, and 3 to 7 of attempt 2."""
    for attempt, first in ((1, 0), (2, 3)):
        write_attempt(store, attempt, range(first, first + 5), StartEvent(1, attempt, step=first))


class Rows:
    """Writer of a ledger in which each flush adds a file with a step and a file with an event, both with the same number."""

    def __init__(self, store: Store, attempt: int = 1):
        self._attempt = attempt
        self.steps, self.events = RowWriter(store, STEPS, f"{attempt:06d}"), RowWriter(store, EVENTS, f"{attempt:06d}")
        self.count = 0

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            self.steps.append(vars(step_row(self._attempt, self.count)))
            self.steps.flush()
            self.events.append(LossEvent(1.0, 4, step=self.count, time=float(self.count // 2)).row())
            self.events.flush()
            self.count += 1


def numbers(ledger: Ledger) -> tuple[list[int], list[int]]:
    """Return the numbers of the steps and of the events of a ledger that `Rows` wrote."""
    events = [event.step for event in decode_events(ledger.events)]
    return ledger.steps["step"].to_pylist(), sorted(step for step in events if step is not None)


def assert_each_once(store: Store, count: int) -> None:
    assert numbers(read_ledger(store)) == (list(range(count)), list(range(count)))
