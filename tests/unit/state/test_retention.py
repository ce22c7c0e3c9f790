"""Retention keeps the newest."""

from hypothesis import given
from hypothesis import strategies as st

from undula.state.retention import superseded


@given(st.lists(st.integers(0, 99), unique=True), st.integers(1, 5))
def test_the_newest_are_kept_and_all_others_go(steps: list[int], keep: int) -> None:
    gone = superseded([(step, f"step {step}") for step in steps], keep)
    assert gone == [f"step {step}" for step in sorted(steps)[: max(len(steps) - keep, 0)]]
