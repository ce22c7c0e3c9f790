"""Tests of parts of a step with state of their own: they are the same at any world size, through resumes and hand-overs."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from example_parts import Average, adding
from features import FEATURES, Group, train_in_groups
from ranks import on_ranks

from undula.errors import CheckpointError, UsageError
from undula.train import step_part
from undula.train.job import Job
from undula.train.step_part import StepPart, added_parts

PLACES = ("the checkpoint", "the memory of a node", "the memory of a worker")


def averages(rank: int, world_size: int, job: Job, row: str, groups: tuple[Group, ...]) -> tuple[int, list[Any]]:
    """Train a row, and return the number of steps that the average has at the end, and the average itself."""
    with adding("average", Average) as made:
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


def without_average(rank: int, world_size: int, job: Job, has_average: tuple[bool, ...], resumes: bool) -> str:
    """Train on ranks of which only some have the average, and return the error.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        job: The job.
        has_average: Whether each rank has the average, or each of two groups on one rank.
        resumes: Whether a second group resumes.
    """
    groups = (Group(3, "the checkpoint"),), (Group(),)
    try:
        for number, group in enumerate(groups if resumes else groups[1:]):
            with adding("average", Average) if has_average[number if resumes else rank] else nullcontext():
                train_in_groups(rank, world_size, {"plain": job}, group)
    except (UsageError, CheckpointError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("has_average", [(True, False), (False, True)])
def test_a_run_that_resumes_has_the_parts_that_it_was_saved_with(tmp_path: Path, has_average: tuple[bool, ...]) -> None:
    """An average that begins in the middle of a run would be another one, and one that ends would be lost."""
    (error,) = on_ranks(1, without_average, FEATURES["plain"].job(tmp_path / "job"), has_average, True)
    then, now = ("the parts average of other packages" if has else "no part of another package" for has in has_average)
    assert f"the run was saved with {then}, and a worker has {now}; restore the previous settings" in error


def test_all_ranks_have_the_same_parts(tmp_path: Path) -> None:
    job = FEATURES["plain"].job(tmp_path / "job")
    for error in on_ranks(2, without_average, job, (True, False), False):
        assert (
            "no part of another package and the parts average of other packages; install the packages on all nodes"
            in error
        )


def test_only_step_parts_with_names_of_their_own_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job, module = FEATURES["plain"].job(tmp_path), torch.nn.Linear(1, 1)
    makes = {"wrong": 3, "average": Average(module), "absent": None, "right": StepPart()}
    monkeypatch.setattr(step_part.extensions, "names", lambda *_: [*makes])
    monkeypatch.setattr(step_part.extensions, "load", lambda _group, _own, name: lambda *_: makes[name])
    given: Any = (job, module, None, None, 4)
    with pytest.raises(
        UsageError, match=r"'wrong' of undula\.parts made an object of type int; return a StepPart or None"
    ):
        added_parts(*given)
    del makes["wrong"]
    assert added_parts(*given) == {"average": makes["average"], "right": makes["right"]}
    makes["mean"] = makes["average"]
    with pytest.raises(
        UsageError, match=r"'mean' of undula\.parts has state under the name 'average\.0?\.?\w+'; let it begin"
    ):
        added_parts(*given)
