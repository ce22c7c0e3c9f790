"""Tests of the feed of trackers: each step once, in order, as it was committed first, through replays and merges of the ledger's files."""

from dataclasses import replace
from pathlib import Path

import pytest
from ledger_rows import step_row

from undula.state.attempts import Lineage, begin
from undula.state.events import Event, LogEvent, ValidationEvent
from undula.state.ledger import EventWriter, RowWriter, compact
from undula.state.ledger_files import STEPS
from undula.storage import Store
from undula.telemetry.feed import MOST_STEPS, Feed
from undula.telemetry.tracker import TrackedStep


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def write(store: Store, attempt: int, steps: range, merged: int = 1) -> None:
    """Write rows of committed steps, whose loss is the number of their attempt."""
    writer = RowWriter(store, STEPS, f"{attempt:06d}")
    for step in steps:
        row = replace(step_row(attempt, step), loss=float(attempt), time=float(step), merged_steps=merged)
        writer.append(vars(row))
    writer.flush()


def record(store: Store, *events: Event) -> None:
    writer = EventWriter(store, "test")
    for event in events:
        writer.event(event)


def take(feed: Feed, is_over: bool = False) -> list[TrackedStep]:
    """Read the ledger, and return all steps that are due."""
    feed.read()
    sent = []
    while steps := feed.due(is_over):
        feed.sent(steps)
        sent += steps
    return sent


def losses(steps: list[TrackedStep]) -> list[tuple[int, float]]:
    return [(step.step, step.values["loss/train"]) for step in steps]


def test_the_newest_step_waits_for_the_next_one_or_the_end(store: Store) -> None:
    feed = Feed(store, None)
    write(store, 1, range(3))
    assert losses(take(feed)) == [(1, 1.0), (2, 1.0)]
    assert take(feed) == []
    write(store, 1, range(3, 5))
    assert losses(take(feed)) == [(3, 1.0), (4, 1.0)]
    assert losses(take(feed, is_over=True)) == [(5, 1.0)]
    assert take(feed, is_over=True) == []


def test_the_first_commit_of_a_step_counts_whether_it_was_sent_before_the_crash_or_not(store: Store) -> None:
    write(store, 1, range(6))
    early = Feed(store, None)
    before = take(early)
    write(store, 2, range(3, 9))
    late = Feed(store, None)
    assert losses(before + take(early, is_over=True)) == losses(take(late, is_over=True))
    whole = [(step, 1.0 if step <= 6 else 2.0) for step in range(1, 10)]
    for newest in (None, 0, 4, 8, 9):  # a feed goes on after the newest step of its tracker
        assert losses(take(Feed(store, newest), is_over=True)) == whole[newest or 0 :]


def test_steps_of_an_elastic_batch_that_end_elsewhere_after_a_crash_never_go_back(store: Store) -> None:
    write(store, 1, range(0, 12, 4), merged=4)
    write(store, 2, range(8, 17, 3), merged=3)
    steps = [step for step, _ in losses(take(Feed(store, None), is_over=True))]
    assert steps == [4, 8, 12, 14, 17]


def test_rows_of_an_attempt_that_does_not_belong_to_the_run_are_left_out(store: Store) -> None:
    begin(store, 2, Lineage(unrecorded=0), step=0, checkpoints=())
    write(store, 1, range(4))  # a worker of a deleted run writes on
    write(store, 2, range(3))
    assert losses(take(Feed(store, None), is_over=True)) == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_merged_files_of_the_ledger_add_nothing(store: Store) -> None:
    feed, steps = Feed(store, None), []
    for step in range(40):
        write(store, 1, range(step, step + 1))
        record(store, ValidationEvent(float(step), 1, step=step + 1))
        steps += take(feed)
        if step % 7 == 6:
            compact(store)
    steps += take(feed, is_over=True)
    assert [(step.step, step.values["loss/validation"]) for step in steps] == [(n + 1, float(n)) for n in range(40)]
    assert len(feed.events) == 40


def test_what_happens_between_steps_goes_with_the_step_before_and_its_first_value_counts(store: Store) -> None:
    record(store, ValidationEvent(9.0, 1, {"accuracy": 0.5}, step=0))
    feed = Feed(store, None)
    assert take(feed) == []
    write(store, 1, range(3))
    record(store, LogEvent({"f1": 0.5}, step=2), ValidationEvent(8.0, 1, step=2), LogEvent({"em": 0.25}, step=2))
    record(store, LogEvent({"f1": 0.75}, step=2), ValidationEvent(7.0, 1, step=2))  # repeated after a crash
    first, one, two = take(feed)
    assert (first.step, first.values) == (0, {"loss/validation": 9.0, "accuracy/validation": 0.5})
    assert two.values.items() - one.values.items() >= {
        ("logged/f1", 0.5),
        ("logged/em", 0.25),
        ("loss/validation", 8.0),
    }
    assert one.values.keys() == two.values.keys() - {"logged/f1", "logged/em", "loss/validation"}
    write(store, 1, range(3, 4))
    record(store, ValidationEvent(6.0, 1, step=3), ValidationEvent(5.0, 1, step=4))
    assert [step.values["loss/validation"] for step in take(feed, is_over=True)] == [6.0, 5.0]


def test_a_long_backlog_is_sent_in_parts(store: Store) -> None:
    write(store, 1, range(2 * MOST_STEPS + 5))
    feed = Feed(store, None)
    feed.read()
    sizes = []
    while steps := feed.due(is_over=True):
        sizes.append(len(steps))
        feed.sent(steps)
    assert sizes == [MOST_STEPS, MOST_STEPS, 5]
