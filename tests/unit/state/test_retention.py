"""Tests of the retention of checkpoints."""

from hypothesis import given
from hypothesis import strategies as st

from undula.state.checkpoint import superseded


@given(st.lists(st.integers(0, 99), unique=True), st.integers(1, 5))
def test_all_but_the_newest_checkpoints_are_superseded(steps: list[int], keep: int) -> None:
    found = superseded([(1, step, f"step {step}") for step in steps], keep)
    assert found == [f"step {step}" for step in sorted(steps)[: max(len(steps) - keep, 0)]]


def test_the_best_checkpoint_is_kept_beside_the_newest_ones() -> None:
    known = [(1, step, f"step {step}") for step in (1, 2, 3, 4)]
    assert superseded(known, keep=2, best="step 1") == ["step 2"]
    assert superseded(known, keep=2, best="step 4") == ["step 1", "step 2"]


def test_the_checkpoints_of_later_attempts_are_newer() -> None:
    assert superseded([(10, 7, "a10"), (9, 7, "a9"), (11, 6, "a11")], keep=1) == ["a9", "a10"]
