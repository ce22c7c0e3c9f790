"""Tests of the ledger: no row is lost, and a step that was repeated counts once."""

import threading
import time
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_rows import step_row, write_attempt, write_two_attempts

from undula.errors import StorageError, SupersededError
from undula.state import ledger as module
from undula.state.attempts import begin, claim
from undula.state.events import CrashEvent, EndEvent, StartEvent
from undula.state.ledger import LedgerWriter, committed, decode_events, last_event, read_ledger, recorded_attempts
from undula.state.ledger_files import STEPS
from undula.storage import Store


def test_later_attempts_replace_the_steps_of_earlier_ones(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_two_attempts(store)
    ledger = read_ledger(store)
    assert ledger.steps["step"].to_pylist() == list(range(8))
    assert ledger.steps["attempt"].to_pylist() == [1, 1, 1, 2, 2, 2, 2, 2]
    assert ledger.replaced["step"].to_pylist() == [3, 4]
    assert ledger.steps["sample_digest"][0].as_py() == 2**64 - 1
    last = last_event(ledger.events, StartEvent)
    assert last is not None
    assert (last.world_size, last.attempt, last.step) == (1, 2, 3)
    assert last_event(ledger.events, EndEvent) is None


def test_a_file_is_written_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    writer = LedgerWriter(store, 1)
    contents: dict[str, bytes] = {}
    for step in range(3):
        writer.step(step_row(1, step))
        writer.flush()
        names = [entry.name for entry in store.list("ledger")]
        assert len(names) == step + 1
        assert all(store.read(name) == content for name, content in contents.items())
        contents = {name: store.read(name) for name in names}
    writer.close()
    assert read_ledger(store).steps["step"].to_pylist() == list(range(3))


def test_a_flush_ends_although_rows_are_added_meanwhile(tmp_path: Path) -> None:
    class Training(Store):
        def write(self, name: str, data: bytes) -> None:
            super().write(name, data)
            writer.append(asdict(step_row(1, writer.files + 1)))

    writer = module.RowWriter(Training(str(tmp_path)), STEPS, "000001")
    writer.append(asdict(step_row(1, 0)))
    for flushes in range(1, 3):
        writer.flush()
        assert read_ledger(Store(str(tmp_path))).steps["step"].to_pylist() == list(range(flushes))


def test_append_does_not_wait_for_the_storage_and_no_row_is_lost_to_its_faults(tmp_path: Path) -> None:
    is_writing, may_fail = threading.Event(), threading.Event()

    class Faulty(Store):
        def write(self, name: str, data: bytes) -> None:
            if not may_fail.is_set():
                is_writing.set()
                may_fail.wait()
                raise StorageError("no space")
            super().write(name, data)

    writer = module.RowWriter(Faulty(str(tmp_path)), STEPS, "000001")
    writer.append(asdict(step_row(1, 0)))

    def flush_once() -> None:
        with pytest.raises(StorageError):
            writer.flush()

    flush = threading.Thread(target=flush_once)
    flush.start()
    assert is_writing.wait(10)
    writer.append(asdict(step_row(1, 1)))  # during the blocked write
    may_fail.set()
    flush.join()
    writer.flush()
    assert read_ledger(Store(str(tmp_path))).steps["step"].to_pylist() == [0, 1]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 15)), min_size=1, max_size=6))
def test_each_step_is_committed_once_by_the_last_attempt_that_ran_it(resumes: list[tuple[int, int]]) -> None:
    """As in a real run, each attempt starts at or before the end of the steps so far."""
    attempts, steps, reached = [], [], 0
    owner: dict[int, int] = {}
    for attempt, (start, length) in enumerate(resumes, 1):
        start = min(start, reached)
        owner = {step: who for step, who in owner.items() if step < start}
        for step in range(start, start + length):
            attempts.append(attempt)
            steps.append(step)
            owner[step] = attempt
        reached = start + length
    keep = committed(np.array(attempts), np.array(steps))
    assert {(s, a) for s, a, k in zip(steps, attempts, keep, strict=True) if k} == set(owner.items())


def test_an_event_is_stored_at_once_or_survives_a_disk_that_is_full_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, events = Store(str(tmp_path)), (CrashEvent("failure", "a worker died"), StartEvent(1, 1, step=0))
    assert read_ledger(store).steps.num_rows == 0
    ledger = LedgerWriter(store, 1)
    ledger.event(events[0])
    assert decode_events(read_ledger(store).events) == events[:1]
    with monkeypatch.context() as full:
        full.setattr(Store, "write", Mock(side_effect=StorageError("cannot write: No space left on device")))
        ledger.event(events[1])
        with pytest.raises(StorageError):  # a checkpoint's commit needs this
            ledger.flush()
    ledger.close()
    assert decode_events(read_ledger(store).events) == events


def test_rows_that_a_later_attempt_writes_again_count_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first, second = LedgerWriter(store, 1), LedgerWriter(store, 2)
    for step in range(3):
        first.step(step_row(1, step))
    first.flush()
    assert first.stored_steps == 3
    second.event(StartEvent(1, 2, "the memory of a worker", step=4))
    for step in (2, 3):  # the last step of the other ranks of the first attempt, whose rank 0 was lost with step 3
        second.step(step_row(1, step))
    second.step(step_row(2, 4))
    second.close()
    ledger = read_ledger(store)
    assert ledger.steps["step"].to_pylist() == [0, 1, 2, 3, 4]
    assert ledger.steps["attempt"].to_pylist() == [1, 1, 1, 1, 2]
    assert ledger.replaced.num_rows == 0


def test_a_second_writer_with_the_same_number_replaces_no_rows(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for steps in (range(50), range(50, 60)):
        write_attempt(store, 5, steps)
    assert read_ledger(store).steps["step"].to_pylist() == list(range(60))


def test_an_attempt_adds_no_steps_once_its_thread_has_found_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.01)
    store = Store(str(tmp_path))
    number, _ = claim(store, ())
    writer = LedgerWriter(store, number)
    writer.step(step_row(number, 0))
    claim(store, ())

    def add_steps() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            writer.step(step_row(number, 1))

    with pytest.raises(SupersededError, match=r"^attempt 2 of .* was started on .*, so the older attempt 1 ends"):
        add_steps()
    writer.close()


def test_steps_that_an_older_attempt_writes_after_a_newer_one_has_begun_do_not_count(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for start in (0, 3):
        number, before = claim(store, recorded_attempts(store))
        begin(store, number, before, start, ())
        if start == 0:
            writer = LedgerWriter(store, number)
            for step in range(3):
                writer.step(step_row(number, step))
            writer.flush()
    for step in range(3, 9):
        writer.step(step_row(1, step))
    writer.close()
    ledger = read_ledger(store)
    assert ledger.steps["step"].to_pylist() == [0, 1, 2]
    assert ledger.replaced["step"].to_pylist() == list(range(3, 9))
