"""Tests of the decisions about the worker group."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.elastic.pure.policy import (
    HANG_FLOOR_S,
    LEAVE_S,
    Decision,
    Growth,
    Hold,
    Resize,
    Save,
    View,
    WorkerSlot,
    decide,
    hang_limit_s,
    limiting_step_s,
    lost_ranks,
    reason_to_stay,
)
from undula.recovery.progress import (
    BETWEEN_STEPS,
    COMPUTE,
    DATA,
    LEFT,
    REDUCE,
    SAVE,
    SHARDED_COMPUTE,
    SNAPSHOT,
    START_LIMIT_S,
    STARTING,
    UPDATE,
    VALIDATE,
    Phase,
    Progress,
    ProgressView,
)
from undula.state.events import ResizeEvent

NOW = 1_000_000.0
LIMIT_S = 5.0
PHASES = st.sampled_from([STARTING, DATA, COMPUTE, SHARDED_COMPUTE, REDUCE, SNAPSHOT, UPDATE, VALIDATE, SAVE, LEFT])
SLOTS = st.lists(
    st.builds(WorkerSlot, st.uuids().map(str), st.sampled_from("abcd"), st.booleans()),
    unique_by=lambda slot: slot.worker,
    max_size=8,
)


def slots(group: str, ready: str = "") -> list[WorkerSlot]:
    """Return workers from letters, which are also the names of their nodes: training workers and ready ones."""
    return [WorkerSlot(f"{node}{number}", node, number < len(group)) for number, node in enumerate(group + ready)]


@pytest.mark.parametrize(
    ("view", "low", "workers"),
    [
        pytest.param(View(NOW, slots("ab")), 1, None, id="no change"),
        pytest.param(View(NOW, slots("a", "b")), 1, ("a0", "b1"), id="a ready worker joins"),
        pytest.param(View(NOW, slots("ab", "c")), 1, None, id="the group has its maximum"),
        pytest.param(View(NOW, slots("ab"), {"b": NOW + 20}, NOW - 2), 1, ("a0",), id="a notice"),
        pytest.param(View(NOW, slots("ab"), {"a": NOW + 20}, NOW - 2), 1, ("b1",), id="a notice for the node of rank 0"),
        pytest.param(View(NOW, slots("ab", "c"), {"b": NOW + 20}, NOW - 2), 2, ("a0", "c2"), id="a ready worker replaces another"),
        pytest.param(View(NOW, slots("ab"), {"b": NOW + 3}, NOW), 1, ("a0",), id="a short notice is not delayed"),
    ],
)  # fmt: skip
def test_the_group_follows_ready_workers_and_notices(view: View, low: int, workers: tuple[str, ...] | None) -> None:
    decision = decide(view, low, 2)
    assert decision == Hold() if workers is None else isinstance(decision, Resize) and decision.workers == workers


def test_growth_that_does_not_pay_waits_unless_it_is_configured() -> None:
    view = View(
        NOW, slots("a", "b"), growth=Growth(interval_s=5.0, cost_s=4.0)
    )  # it would win 1 x 5 s and lose 2 x 4 s
    assert decide(view, 1, 2) == Hold()
    assert isinstance(decide(view, 1, 2, grow="always"), Resize)
    assert decide(View(NOW, slots("a", "b")), 1, 2, grow="never") == Hold()


def test_a_worker_that_moves_names_both_nodes() -> None:
    decision = decide(View(NOW, slots("a", "b"), {"a": NOW + 20}, NOW - 2), 1, 1)
    assert isinstance(decision, Resize)
    message = ResizeEvent(1, 1, decision.reason).message
    assert message == "The group stays at 1 worker: 1 worker moves from node a, which will be removed, to node b."


def test_a_group_that_stays_small_says_why() -> None:
    ready, alone, full = slots("a", "b"), slots("a"), slots("ab")
    dear = Growth(interval_s=5.0, cost_s=4.0)
    assert reason_to_stay(View(NOW, ready, growth=dear), 2, "auto", starting=0) == "pause"
    assert reason_to_stay(View(NOW, alone), 2, "never", starting=0) == "never"
    assert reason_to_stay(View(NOW, alone), 2, "auto", starting=0) == "room"
    assert reason_to_stay(View(NOW, alone), 2, "auto", starting=1) is None, "the event about its node says so"
    assert reason_to_stay(View(NOW, full), 2, "never", starting=0) is None
    assert reason_to_stay(View(NOW, alone, {"a": NOW + 20}), 2, "auto", starting=0) is None


@given(st.floats(1, 1e4), st.floats(0.1, 1e3), st.integers(1, 20), st.integers(1, 8), st.integers(1, 8))
def test_growth_pays_after_the_time_that_is_told(
    interval_s: float, cost_s: float, changes: int, current: int, more: int
) -> None:
    """The expected interval is the time of the run divided by its changes, so that it grows while nothing changes."""
    growth, wanted = Growth(interval_s, cost_s, changes), current + more
    wait_s = growth.pays_in_s(current, wanted)
    assert (wait_s == 0) == growth.pays(current, wanted)
    later = replace(growth, interval_s=interval_s + (wait_s + 1e-3) / changes)
    assert later.pays(current, wanted)


def test_a_resize_waits_for_a_checkpoint_until_shortly_before_the_deadline() -> None:
    def until(**changes: Any) -> float:
        decision = decide(View(NOW, **changes), 1, 2)
        assert isinstance(decision, Resize)
        return decision.until

    assert until(slots=slots("ab"), deadlines={"b": NOW + 60}, step_s=2.0) == NOW + 60 - LEAVE_S - 6
    assert until(slots=slots("ab"), deadlines={"b": math.inf}) == NOW
    assert until(slots=slots("a", "b")) == math.inf


def test_two_notices_close_together_cost_one_resize() -> None:
    both = {"b": NOW + 60, "c": NOW + 60}
    assert decide(View(NOW, slots("abc"), {"b": NOW + 60}, noticed=NOW - 0.1), 1, 3) == Hold()
    decision = decide(View(NOW + 2, slots("abc"), both, noticed=NOW), 1, 3)
    assert isinstance(decision, Resize)
    assert decision.workers == ("a0",)


def test_below_min_workers_the_group_saves_and_trains_until_shortly_before_the_deadline() -> None:
    def at(now: float, deadline: float, is_saved: bool) -> Decision:
        return decide(View(now, slots("ab"), {"b": deadline}, NOW - 2, is_saved=is_saved, step_s=1.0), 2, 2)

    first = at(NOW, NOW + 30, is_saved=False)
    assert isinstance(first, Save)
    assert not first.ends
    assert at(NOW + 20, NOW + 30, is_saved=True) == Hold()
    for last in (at(NOW + 22, NOW + 30, is_saved=True), at(NOW, NOW + 8, False), at(NOW, math.inf, False)):
        assert isinstance(last, Save)
        assert last.ends


@given(SLOTS, st.sets(st.sampled_from("abcd")), st.integers(1, 4), st.integers(0, 4))
def test_no_decision_uses_a_node_with_a_notice_or_too_many_workers(
    chosen: list[WorkerSlot], doomed: set[str], low: int, more: int
) -> None:
    view = View(NOW, chosen, dict.fromkeys(doomed, math.inf), noticed=NOW - 10)
    decision = decide(view, low, low + more)
    if isinstance(decision, Resize):
        nodes = {slot.worker: slot.node for slot in chosen}
        assert low <= len(decision.workers) <= low + more or len(decision.workers) > sum(s.in_group for s in chosen)
        assert len(decision.workers) <= low + more
        assert not doomed & {nodes[worker] for worker in decision.workers}
        assert len(set(decision.workers)) == len(decision.workers)


def rank(phase: Phase, phase_s: float, longest_step_s: float = 0.5) -> ProgressView:
    return ProgressView(10, phase, phase_s, longest_step_s)


def limit_of(phase: Phase, longest_step_s: float = 0.5) -> float:
    return LIMIT_S if phase.is_brief and longest_step_s else START_LIMIT_S


def test_the_time_limit_of_a_hang_follows_the_step_time() -> None:
    assert hang_limit_s(3.0, None) == pytest.approx(30)
    assert hang_limit_s(0.01, None) == HANG_FLOOR_S
    assert hang_limit_s(0.0, None) == START_LIMIT_S
    assert hang_limit_s(3.0, 7.0) == 7.0


def test_steps_that_are_long_now_and_then_cost_a_worker_once_at_most() -> None:
    """Each 25th step of a run takes 9 s in a micro-batch, and the others 50 ms. A new group begins with the step that was lost."""
    progress, limiting_s, was_hung, lost = Progress(), 0.0, False, []
    for step in range(100):
        seconds = 9.0 if step % 25 == 24 else 0.05
        view = replace(progress.view(), phase=COMPUTE, phase_s=seconds)
        limiting_s = limiting_step_s([view], limiting_s, was_hung)
        if lost_ranks([view], [0.0], hang_limit_s(limiting_s, None)):
            lost, was_hung, progress = [*lost, step], True, Progress()
        progress.committed(step + 1, seconds)
    assert lost == [24]
    hung = replace(progress.view(), phase=COMPUTE, phase_s=91.0)
    assert lost_ranks([hung], [0.0], hang_limit_s(limiting_s, None)) == [0]


@pytest.mark.parametrize(
    ("ranks", "lost"),
    [
        # A rank stuck in the user's code is lost, and ranks that wait for it are not.
        ([rank(REDUCE, 9), rank(COMPUTE, 9), rank(REDUCE, 9)], [1]),
        # Ranks in a deadlock are all lost.
        ([rank(REDUCE, 9), rank(REDUCE, 8)], [0, 1]),
        ([rank(REDUCE, 9), rank(REDUCE, 1)], []),
        ([rank(SHARDED_COMPUTE, 9), rank(REDUCE, 9)], [0, 1]),
        # Ranks of a sharded model that wait for one without data are not lost.
        ([*[rank(SHARDED_COMPUTE, 300)] * 3, rank(DATA, 301)], []),
        ([*[rank(SHARDED_COMPUTE, 300)] * 3, rank(DATA, START_LIMIT_S + 1)], [3]),
        # Slow data, snapshots, updates and validations do not count as a hang.
        ([rank(REDUCE, 50), rank(DATA, 50)], []),
        ([rank(REDUCE, 50), rank(SNAPSHOT, 50)], []),
        ([rank(REDUCE, 50), rank(UPDATE, 50)], []),
        ([rank(REDUCE, 601), rank(UPDATE, START_LIMIT_S + 1)], [1]),
        ([rank(VALIDATE, 50), rank(VALIDATE, 50)], []),
        ([rank(BETWEEN_STEPS, START_LIMIT_S + 1), rank(VALIDATE, 0.2)], []),
        ([rank(DATA, START_LIMIT_S + 1)], [0]),
        # Work that was not done before has the time limit of a start.
        ([rank(REDUCE, 50), rank(COMPUTE, 50, 0.0)], []),
        ([rank(COMPUTE, START_LIMIT_S + 1, 0.0)], [0]),
        ([rank(COMPUTE.unless_known(False), 50)], []),
        ([rank(COMPUTE.unless_known(True), 50)], [0]),
    ],
)
def test_ranks_without_progress_are_lost_unless_they_may_be_waiting(ranks: list[ProgressView], lost: list[int]) -> None:
    assert lost_ranks(ranks, [0.0] * len(ranks), LIMIT_S) == lost


def test_a_rank_whose_process_does_not_answer_is_lost_and_waiting_ranks_are_not() -> None:
    assert lost_ranks([rank(REDUCE, 9), rank(COMPUTE, 1)], [0.0, 9.0], LIMIT_S) == [1]


def test_the_limit_of_a_phase_follows_its_bytes() -> None:
    saving = ProgressView(10, SAVE, START_LIMIT_S + 50, 0.5, allowed_s=100.0)
    assert lost_ranks([saving], [0], LIMIT_S) == []
    assert lost_ranks([replace(saving, phase_s=START_LIMIT_S + 101)], [0], LIMIT_S) == [0]
    copying = replace(saving, phase_s=1.0)
    assert lost_ranks([copying], [100.0], LIMIT_S) == []
    assert lost_ranks([copying], [106.0], LIMIT_S) == [0]


@st.composite
def timelines(draw: st.DrawFn) -> list[list[tuple[Phase, float]]]:
    """Return (phase, seconds) of each rank, over the same time. The last phase of a rank has no end."""
    of_rank = st.lists(st.tuples(PHASES, st.floats(0.01, 2 * START_LIMIT_S)), min_size=1, max_size=5)
    return draw(st.lists(of_rank, min_size=1, max_size=4))


def seen(timeline: list[tuple[Phase, float]], at: float) -> ProgressView:
    """Return the progress of a rank at a time."""
    began = 0.0
    for phase, seconds in timeline[:-1]:
        if at < began + seconds:
            return rank(phase, at - began)
        began += seconds
    return rank(timeline[-1][0], max(at - began, 0.0))


@given(timelines(), st.data())
def test_a_rank_that_may_be_waiting_is_not_lost_while_another_does_its_own_work(
    ranks: list[list[tuple[Phase, float]]], data: st.DataObject
) -> None:
    """The controller learns the progress of the ranks at different times, each of which can be as old as a poll without an answer."""
    now = data.draw(st.floats(LIMIT_S, 4 * START_LIMIT_S))
    ages = [data.draw(st.just(0.0) | st.floats(0.0, LIMIT_S)) for _ in ranks]
    views = [seen(timeline, now - age) for timeline, age in zip(ranks, ages, strict=True)]
    lost = lost_ranks(views, ages, LIMIT_S)
    assert lost == sorted(set(lost))
    at_fault = [view for view in (views[number] for number in lost) if not view.phase.may_wait]
    assert all(view.phase_s > limit_of(view.phase) for view in at_fault)
    if len(at_fault) < len(lost):
        # All ranks were waiting together, for longer than the shortest of their limits.
        assert len(lost) == len(ranks)
        together_until = now - max(ages)
        for view, age in zip(views, ages, strict=True):
            assert view.phase.may_wait
            assert now - age - view.phase_s < together_until - limit_of(view.phase)


@given(st.lists(st.tuples(PHASES, st.floats(0, 2 * START_LIMIT_S)), min_size=1, max_size=6), st.data())
def test_a_hang_is_always_found(states: list[tuple[Phase, float]], data: st.DataObject) -> None:
    views = [rank(phase, seconds) for phase, seconds in states]
    fresh = [0.0] * len(views)
    number = data.draw(st.integers(0, len(views) - 1))
    # A rank that does not answer.
    assert number in lost_ranks(views, [9.0 if other == number else 0.0 for other in range(len(views))], LIMIT_S)
    # A rank whose own work takes too long, whatever the others do.
    own = data.draw(st.sampled_from([DATA, COMPUTE, SNAPSHOT, UPDATE, VALIDATE]))
    hung = [rank(own, limit_of(own) + 1) if other == number else view for other, view in enumerate(views)]
    assert number in lost_ranks(hung, fresh, LIMIT_S)
    # Ranks that all wait.
    waiting = [rank(view.phase if view.phase.may_wait else REDUCE, START_LIMIT_S + 1) for view in views]
    assert lost_ranks(waiting, fresh, LIMIT_S) == list(range(len(views)))
