"""Tests of goodput: every second of every rank is in exactly one class."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_rows import ledger_of, step_of

from undula.report.data.goodput import CLASSES, goodput
from undula.state.events import EndEvent, Event, GroupEvent, StopEvent, WaitingEvent, WorkerPlace
from undula.state.records import StepRow


def row(step: int, time: float, attempt: int, world: int, data_s: float = 0.1, blocked_s: float = 0.0) -> StepRow:
    seconds = {
        "data_s": data_s,
        "compute_s": 0.9 - data_s,
        "communication_s": 0.1,
        "other_s": 0.0,
        "blocked_s": blocked_s,
    }
    return step_of(step, time=time, attempt=attempt, world_size=world, **seconds)


def group(time: float, workers: int, job: str = "") -> GroupEvent:
    places: list[WorkerPlace] = [{"rank": rank} for rank in range(workers)]
    return GroupEvent(tuple(places), job, time=time)


def test_a_run_without_faults_is_useful_except_for_its_start_and_its_waits() -> None:
    events = [group(0.0, 2), EndEvent(time=13.0)]
    spent = goodput(ledger_of([row(step, 4.0 + step, 1, 2) for step in range(10)], events), events)
    # Two ranks start for 3 s and take ten steps of 1 s, each with 0.1 s of waiting.
    assert spent.seconds["restarting"] == pytest.approx(6)
    assert spent.seconds["data"] == pytest.approx(2)
    assert spent.seconds["useful"] == pytest.approx(18)
    assert spent.held_s == pytest.approx(26)
    assert spent.share == pytest.approx(18 / 26)


def test_replayed_steps_and_waiting_for_nodes_are_separate_classes() -> None:
    events = [
        group(0.0, 2),
        WaitingEvent(1, time=5.0),
        group(9.0, 1),
        EndEvent(time=13.0),
    ]
    first = [row(step, 2.0 + step, 1, 2, data_s=0.0) for step in range(3)]
    again = [row(step, 11.0 + step - 1, 2, 1, data_s=0.0) for step in range(1, 4)]
    spent = goodput(ledger_of([first[0], *again], events, first[1:]), events)
    assert spent.seconds["replayed"] == pytest.approx(4)  # two steps of 1 s on two ranks
    assert spent.seconds["useful"] == pytest.approx(2 + 3)
    assert spent.seconds["capacity"] == pytest.approx(4)  # one worker was ready
    assert spent.held_s == pytest.approx(5 * 2 + 4 * 1 + 4 * 1)


def test_workers_that_become_ready_during_a_wait_are_held_from_then_on() -> None:
    waiting = [WaitingEvent(ready, time=5.0 + 2 * ready) for ready in range(3)]
    events = [group(0.0, 3), *waiting, group(19.0, 3), EndEvent(time=20.0)]
    spent = goodput(ledger_of([row(0, 5.0, 1, 3)], events), events)
    assert spent.seconds["capacity"] == pytest.approx(2 * 0 + 2 * 1 + 10 * 2)


def waiting(time: float, ready: int, job: str = "a") -> WaitingEvent:
    place: WorkerPlace = {"node": "n"}
    return WaitingEvent(ready, workers=(place,) * ready, job=job, time=time)


def test_workers_that_wait_for_the_first_group_are_held() -> None:
    events = [
        waiting(0.0, 0),
        waiting(4.0, 1),
        group(9.0, 2, "a"),
        EndEvent(time=13.0),
    ]
    spent = goodput(ledger_of([row(0, 12.0, 1, 2)], events), events)
    assert spent.seconds["capacity"] == pytest.approx(5)
    assert spent.held_s == pytest.approx(5 + 8)


def test_a_job_that_only_waited_holds_no_worker_until_it_is_submitted_again() -> None:
    events = [waiting(0.0, 2), StopEvent(time=60.0), waiting(86400.0, 1, "b"), EndEvent(time=86410.0)]
    spent = goodput(ledger_of([], events), events)
    assert spent.seconds["capacity"] == pytest.approx(2 * 60 + 10)


@pytest.mark.parametrize("waits", [[], [waiting(1000.0, 1, "b")]])
def test_no_worker_is_held_between_two_submissions_of_a_job(waits: list[Event]) -> None:
    began = [group(0.0, 2, "a"), waiting(6.0, 1), StopEvent(time=8.0)]
    events = [*began, *waits, group(1010.0, 2, "b"), EndEvent(time=1013.0)]
    spent = goodput(ledger_of([row(0, 5.0, 1, 2), row(1, 1012.0, 2, 2)], events), events)
    assert spent.seconds["capacity"] == pytest.approx(2 + 10 * len(waits))
    assert spent.held_s == pytest.approx(2 * 6 + 2 + 10 * len(waits) + 2 * 3)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(0, 5), st.integers(0, 6), st.floats(0, 3)), min_size=1, max_size=5)
)
def test_the_classes_add_up_to_the_held_time(groups: list[tuple[int, float, int, float]]) -> None:
    now, step, held = 0.0, 0, 0.0
    events, rows = [], []
    for attempt, (workers, start_s, steps, end_s) in enumerate(groups):
        events.append(group(now, workers))
        began = now
        now += start_s
        for number in range(steps):
            blocked_s = (
                0.2 if number else 0.0
            )  # blocked on a checkpoint before the step; the first step of a group has none
            now += 1.0 + blocked_s
            rows.append(row(step, now, attempt, workers, blocked_s=blocked_s))
            step += 1
        now += end_s + 0.01
        held += workers * (now - began)
    events.append(EndEvent(time=now))
    spent = goodput(ledger_of(rows, events), events)
    assert set(spent.seconds) == set(CLASSES)
    assert spent.held_s == pytest.approx(held, rel=0.01)
    assert min(spent.seconds.values()) >= -1e-6
