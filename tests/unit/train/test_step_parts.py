"""Tests of parts of a step with state of their own: they are the same at any world size, through resumes and hand-overs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from average_part import averaging
from features import FEATURES, Group, train_in_groups
from ranks import on_ranks

from undula.errors import UsageError
from undula.train import step_part
from undula.train.job import Job
from undula.train.step_part import StepPart, added_parts

PLACES = ("the checkpoint", "the memory of a node", "the memory of a worker")


def averages(rank: int, world_size: int, job: Job, row: str, groups: tuple[Group, ...]) -> tuple[int, list[Any]]:
    """Train a row, and return the number of steps that the average has at the end, and the average itself."""
    with averaging() as made:
        train_in_groups(rank, world_size, {row: job}, groups)
    return made[-1].num_steps, [each.tolist() for each in made[-1].whole()]


@pytest.mark.parametrize("row", ["plain", "plain, sharded in stage 1", "plain, sharded in stage 3"])
@pytest.mark.parametrize("place", PLACES)
def test_an_average_of_the_weights_is_that_of_one_rank_wherever_it_trains(tmp_path: Path, row: str, place: Any) -> None:
    expected = on_ranks(1, averages, FEATURES["plain"].job(tmp_path / "alone"), "plain", (Group(),))[0]
    job = FEATURES[row].job(tmp_path / "together")
    found = on_ranks(3, averages, job, row, (Group(3, place), Group(4, place), Group()))
    for num_steps, of_rank in found:
        assert num_steps == expected[0]
        assert of_rank == expected[1]


def test_a_part_that_is_none_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job, module, makes = (
        FEATURES["plain"].job(tmp_path),
        torch.nn.Linear(1, 1),
        {"wrong": 3, "absent": None, "right": StepPart()},
    )
    monkeypatch.setattr(step_part.extensions, "names", lambda *_: [*makes])
    monkeypatch.setattr(step_part.extensions, "load", lambda _group, _own, name: lambda *_: makes[name])
    given: Any = (job, module, None, None)
    with pytest.raises(
        UsageError, match=r"'wrong' of undula\.parts made an object of type int; return a StepPart or None"
    ):
        [*added_parts(*given)]
    del makes["wrong"]
    assert [*added_parts(*given)] == [makes["right"]]
