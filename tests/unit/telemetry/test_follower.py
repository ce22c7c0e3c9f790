"""Tests of the thread that follows a ledger for a tracker: outages, lost answers, resubmissions, and a tracker that hangs."""

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from ledger_rows import Rows
from trackers_kit import RUN, TAGS, Followed, KeptTracker
from waiting import wait_until

from undula.errors import StorageError
from undula.state.events import EndEvent, Event, FailEvent, StartEvent, StopEvent
from undula.state.ledger import EventWriter
from undula.storage import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def test_a_tracker_that_only_has_the_methods_of_the_protocol_gets_each_step_once(store: Store) -> None:
    tracker = KeptTracker()
    followed = Followed(store, tracker)
    followed.rows.add(5)
    wait_until(lambda: tracker.numbers == [1, 2, 3, 4])
    followed.rows.add(3)
    assert followed.end()
    assert tracker.numbers == list(range(1, 9))
    assert (tracker.runs, tracker.states, tracker.tags) == ([RUN], ["failed"], TAGS)
    assert followed.reports == []


def test_a_tracker_catches_up_after_each_outage_whose_beginning_and_end_are_reported_once(store: Store) -> None:
    tracker = KeptTracker(is_down=True)
    followed = Followed(store, tracker)
    followed.rows.add(3)
    wait_until(lambda: tracker.failures > 1)
    tracker.is_down = False
    wait_until(lambda: len(followed.reports) == 2)
    failures = tracker.failures  # of the first outage
    tracker.is_down = True
    followed.rows.add(4)
    wait_until(lambda: tracker.failures > failures + 1)
    tracker.is_down = False
    wait_until(lambda: len(followed.reports) == 4)
    followed.rows.add(1)
    assert followed.end()
    assert tracker.numbers == list(range(1, 9))
    problems, newest = ["ConnectionRefusedError", "NoneType"], [None, 2, 2, 6]
    assert followed.reports == list(zip(["kept"] * 4, problems * 2, newest, strict=True))


def test_steps_that_were_stored_although_the_answer_was_lost_are_not_sent_again(store: Store) -> None:
    tracker = KeptTracker(stores_before_failing=3)
    followed = Followed(store, tracker)
    followed.rows.add(10)
    wait_until(lambda: tracker.numbers == list(range(1, 10)))
    assert followed.end()
    assert tracker.numbers == list(range(1, 11))
    assert len(tracker.runs) == 2


@dataclass(frozen=True)
class UnreadableStore(Store):
    """Store whose next lists of files fail."""

    failures: list[str] = field(default_factory=list)

    def names(self, folder: str) -> set[str]:
        if self.failures:
            raise StorageError(self.failures.pop())
        return super().names(folder)


def test_a_ledger_that_cannot_be_read_is_no_outage_of_the_tracker(store: Store) -> None:
    tracker, unreadable = KeptTracker(), UnreadableStore(store.url, failures=["away"] * 3)
    followed = Followed(unreadable, tracker, Rows(store))
    followed.rows.add(3)
    wait_until(lambda: tracker.numbers == [1, 2])
    assert followed.end()
    assert (tracker.numbers, followed.reports, len(tracker.runs)) == ([1, 2, 3], [], 1)


def test_the_next_submission_sends_what_the_last_one_could_not(store: Store) -> None:
    tracker = KeptTracker()
    first = Followed(store, tracker)
    first.rows.add(3)
    wait_until(lambda: tracker.numbers == [1, 2])
    tracker.is_down = True
    first.rows.add(2)
    wait_until(lambda: tracker.failures)
    assert not first.end(limit_s=0.1)
    assert isinstance(first.follower.problem, ConnectionRefusedError)
    assert first.follower.newest == 2

    tracker.is_down = False
    second = Followed(store, tracker, first.rows)
    assert second.end()
    assert tracker.numbers == [1, 2, 3, 4, 5]


def test_a_tracker_that_hangs_is_left_behind_at_the_end(store: Store) -> None:
    tracker = KeptTracker(hangs=threading.Event())
    followed = Followed(store, tracker)
    followed.rows.add(3)
    assert not followed.end(limit_s=0.1)
    assert followed.follower.problem is None
    tracker.hangs.set()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((StartEvent(1, 1, step=0), EndEvent(step=3)), "finished"),
        ((StartEvent(1, 1, step=0), StopEvent()), "stopped"),
        ((StartEvent(1, 1, step=0), StopEvent(), FailEvent("no node can train")), "failed"),
        ((StopEvent(), StartEvent(1, 2, step=1)), "failed"),
    ],
)
def test_a_tracker_is_told_how_training_ended(store: Store, events: tuple[Event, ...], state: str) -> None:
    writer = EventWriter(store, "test")
    for number, event in enumerate(events):
        writer.event(replace(event, time=float(number)))
    tracker = KeptTracker()
    assert Followed(store, tracker).end()
    assert tracker.states == [state]
