"""Tests of schedules of faults and traces of nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.errors import SpecError
from undula.testing.faults import Action, Fault, Trace, oracle_rank_s, parse_faults, parse_trace

TIMES = st.one_of(
    st.builds(lambda step: {"at_step": step}, st.integers(0, 10**6)),
    st.builds(lambda tenths: {"at_s": tenths / 10}, st.integers(0, 10**4)),
)
FAULTS = st.one_of(
    st.builds(
        lambda time, action, target: Fault(action, target=target, **time),
        TIMES,
        st.sampled_from([Action.SIGKILL, Action.SIGSTOP, Action.KILL]),
        st.integers(0, 99),
    ),
    st.builds(
        lambda time, target, deadline_s: Fault(Action.DRAIN, target=target, deadline_s=deadline_s, **time),
        TIMES,
        st.integers(0, 9),
        st.integers(0, 999),
    ),
    st.builds(lambda time: Fault(Action.ADD, **time), TIMES),
)
COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=60)


@given(st.lists(FAULTS))
def test_a_written_schedule_parses_to_the_same_faults(faults: list[Fault]) -> None:
    assert parse_faults("\n".join(map(str, faults))) == tuple(faults)


def test_comments_and_blank_lines_are_ignored() -> None:
    assert parse_faults("# a plan\n\nat step 4: add node  # here\n") == (Fault(Action.ADD, at_step=4),)


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (Action.SIGKILL, "sigkill worker 3"),
        (Action.SIGSTOP, "sigstop worker 3"),
        (Action.KILL, "kill node 3"),
        (Action.DRAIN, "drain node 3 deadline 2.5"),
        (Action.ADD, "add node"),
    ],
)
def test_an_action_is_written_and_read_by_its_form(action: Action, sentence: str) -> None:
    fault = Fault(action, at_step=7, target=0 if action is Action.ADD else 3, deadline_s=2.5 * (action is Action.DRAIN))
    assert action.sentence(3, 2.5) == sentence
    assert parse_faults(f"at step 7: {sentence}") == (fault,)
    assert str(fault) == f"at step 7: {sentence}"
    assert action.needs_node == (action in (Action.KILL, Action.DRAIN))


def test_an_invalid_line_is_refused_with_its_number() -> None:
    with pytest.raises(SpecError, match=r"plan\.txt:2: 'at step x: explode' is not a fault; write `at step N"):
        parse_faults("at step 1: add node\nat step x: explode", "plan.txt")


@given(COUNTS, st.integers(1, 5), st.floats(1, 1000))
def test_changes_give_the_count_at_every_time(counts: list[int], most: int, speedup: float) -> None:
    changes = Trace(tuple(counts), 300.0).changes(speedup, most)
    assert changes[0] == (0.0, min(counts[0], most))
    for tick, count in enumerate(counts):
        now = tick * 300.0 / speedup
        assert [nodes for seconds, nodes in changes if seconds <= now][-1] == min(count, most)


@given(COUNTS, st.integers(1, 5), st.integers(1, 5))
def test_a_window_has_the_requested_number_of_changes(counts: list[int], most: int, wanted: int) -> None:
    trace = Trace(tuple(counts), 300.0)
    existing = len(trace.changes(1.0, most)) - 1
    assert len(trace.window(wanted, most).changes(1.0, most)) - 1 == min(wanted, existing)


def test_the_oracle_uses_all_nodes_whenever_there_are_enough() -> None:
    changes = ((0.0, 2), (10.0, 1), (20.0, 0), (30.0, 3))
    assert oracle_rank_s(changes, 35.0, low=1) == 20 + 10 + 0 + 15
    assert oracle_rank_s(changes, 35.0, low=2) == 20 + 0 + 0 + 15
    assert oracle_rank_s(changes, 5.0, low=1) == 10


def test_an_invalid_trace_is_refused() -> None:
    assert parse_trace({"metadata": {"gap_seconds": 60}, "data": [1, 0]}, "t.json") == Trace((1, 0), 60.0)
    for tree in ([], {"data": []}, {"metadata": {"gap_seconds": 60}, "data": [-1]}):
        with pytest.raises(SpecError, match=r"t\.json is not a trace"):
            parse_trace(tree, "t.json")
