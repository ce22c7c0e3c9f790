"""Tests of the retention of checkpoints."""

from hypothesis import given
from hypothesis import strategies as st

from undula.state.retention import superseded


@given(st.lists(st.integers(0, 99), unique=True), st.integers(1, 5))
def test_all_but_the_newest_checkpoints_are_superseded(steps: list[int], keep: int) -> None:
    found = superseded([(step, 1, f"step {step}") for step in steps], keep)
    assert found == [f"step {step}" for step in sorted(steps)[: max(len(steps) - keep, 0)]]


def test_later_attempts_are_kept_at_the_same_step() -> None:
    assert superseded([(7, 10, "a10"), (7, 9, "a9"), (6, 11, "a11")], keep=1) == ["a11", "a9"]
