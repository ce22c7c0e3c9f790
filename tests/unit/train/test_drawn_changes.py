"""Property of runs whose script changes weights or the optimizer's state between steps: whichever rank is killed wherever, bits stay."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from drawn_changes import drawn_change
from features import Feature, numbers_of
from group_kit import Fault, Place, Workers

from undula.parallel.spec import ShardingSpec

DRAWS, OF_THE_NIGHT = 15, 500


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with Workers(tmp_path_factory.mktemp("groups")) as workers:
        yield workers


def check(number: int, folder: Path, workers: Workers) -> None:
    draw = random.Random(-number - 1)
    change, stage = drawn_change(number), draw.randrange(4)
    places = [place for place in get_args(Place) if place != "after a gather"]
    fault = Fault(draw.choice(places), rank=draw.randrange(3), step=draw.randrange(1, 7))
    fault = replace(fault, deaf=tuple(rank for rank in range(3) if rank != fault.rank and draw.random() < 0.3))
    every: Any = draw.choice([None, 1, 4])
    name = f"drawn {number}"
    whole = Feature().job(folder / "whole")
    job = replace(Feature().job(folder / "job"), sharding=ShardingSpec(stage))  # type: ignore[arg-type]
    members = workers.idle(3)
    (end,) = workers.train(members[:1], name, whole, is_new=True)
    assert end is not None
    workers.train(members, name, job, fault=fault, every=every, is_new=True)
    left = [member for rank, member in enumerate(members) if rank != fault.rank]
    ends = workers.train(left, name, job, every=every)
    assert [each and each.how for each in ends] == ["ended", "ended"]
    assert numbers_of(job) == numbers_of(whole), f"{change} in stage {stage}, {fault}, a snapshot every {every} steps"
    workers.rest(left)


@pytest.mark.parametrize("number", range(DRAWS))
def test_what_a_script_changes_is_neither_lost_nor_mixed(number: int, tmp_path: Path, workers: Workers) -> None:
    check(number, tmp_path, workers)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(DRAWS, OF_THE_NIGHT))
def test_what_a_script_changes_is_neither_lost_nor_mixed_in_many_draws(
    number: int, tmp_path: Path, workers: Workers
) -> None:
    check(number, tmp_path, workers)
