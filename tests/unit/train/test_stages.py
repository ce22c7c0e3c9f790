"""Tests that a run goes on in another stage of sharding, from its checkpoint or from the memory of its node, with the same numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from features import FEATURES, Group, Origin, numbers_of, train_in_groups
from ranks import on_ranks

from undula.parallel.spec import ShardingSpec

ROWS = ("plain", "lamb", "fp16")


def numbers(folder: Path, parts: list[tuple[int, int, Group]]) -> dict[str, list[dict[str, Any]]]:
    """Return the numbers of each row on each rank of the last group.

    Args:
        folder: Folder of the runs.
        parts: World size, stage and group of each set of processes.
    """
    jobs = {name: FEATURES[name].job(folder / name) for name in ROWS}
    for world_size, stage, group in parts:
        sharding = ShardingSpec(stage)  # type: ignore[arg-type]
        now = {name: replace(job, sharding=sharding) for name, job in jobs.items()}
        states = on_ranks(world_size, train_in_groups, now, (group,))
    return {name: [numbers_of(job) | of_rank[name] for of_rank in states] for name, job in jobs.items()}


@pytest.mark.parametrize("origin", ["the checkpoint", "the memory of a node"])
def test_a_run_goes_on_in_another_stage_with_the_same_bits(tmp_path: Path, origin: Origin) -> None:
    expected = {name: ranks[0] for name, ranks in numbers(tmp_path / "one", [(1, 0, Group())]).items()}
    parts = [
        (3, 3, Group(2, origin)),
        (2, 0, Group(4, origin)),
        (3, 2, Group(5, origin)),
        (2, 1, Group(6, origin)),
        (1, 3, Group()),
    ]
    for name, ranks in numbers(tmp_path / "several", parts).items():
        for found in ranks:
            assert found == expected[name], name
