"""Tests of the room that checkpoints take."""

import pytest

from undula.state.goals import GoalSpec
from undula.state.spec import CheckpointSpec, lack_of_room, size


@pytest.mark.parametrize(("keep_best", "most"), [(None, 3), (GoalSpec("accuracy", "max"), 4)])
def test_checkpoints_that_do_not_fit_are_named_with_their_number(keep_best: GoalSpec | None, most: int) -> None:
    spec = CheckpointSpec(keep=2, keep_best=keep_best)
    assert lack_of_room(spec, "/runs", 10**9, most * 10**9) is None
    problem = lack_of_room(spec, "/runs", 10**9, most * 10**9 - 10**7)
    assert problem
    assert f"up to {most} checkpoints of 1.00 GB at a time, and /runs has {most - 0.01:.2f} GB free" in problem


def test_sizes_are_readable() -> None:
    assert [size(number) for number in (4_200, 12_400_000, 3_200_000_000)] == ["4.2 kB", "12.4 MB", "3.20 GB"]
