"""Property of runs whose script changes weights or the optimizer's state between steps: whichever rank is killed wherever, bits stay."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from drawn_changes import drawn_change
from features import Feature, numbers_of
from group_kit import Fault, Place, Workers

from undula.parallel.spec import ShardingSpec

DRAWS, OF_THE_NIGHT = 30, 500


def check(number: int, folder: Path) -> None:
    draw = random.Random(-number - 1)
    change, stage = drawn_change(number), draw.randrange(4)
    places = [place for place in get_args(Place) if place != "after a gather"]
    fault = Fault(draw.choice(places), rank=draw.randrange(3), step=draw.randrange(1, 7))
    fault = replace(fault, deaf=tuple(rank for rank in range(3) if rank != fault.rank and draw.random() < 0.3))
    every: Any = draw.choice([None, 1, 4])
    name = f"drawn {number}"
    whole = Feature().job(folder / "whole")
    job = replace(Feature().job(folder / "job"), sharding=ShardingSpec(stage))  # type: ignore[arg-type]
    with Workers(folder) as workers:
        (end,) = workers.train([workers.start()], name, whole)
        assert end is not None
        members = [workers.start() for _ in range(3)]
        workers.train(members, name, job, fault=fault, every=every)
        ends = workers.train(
            [member for rank, member in enumerate(members) if rank != fault.rank], name, job, every=every
        )
    assert [each and each.how for each in ends] == ["ended", "ended"]
    assert numbers_of(job) == numbers_of(whole), f"{change} in stage {stage}, {fault}, a snapshot every {every} steps"


@pytest.mark.parametrize("number", range(DRAWS))
def test_what_a_script_changes_is_neither_lost_nor_mixed(number: int, tmp_path: Path) -> None:
    check(number, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(DRAWS, OF_THE_NIGHT))
def test_what_a_script_changes_is_neither_lost_nor_mixed_in_many_draws(number: int, tmp_path: Path) -> None:
    check(number, tmp_path)
