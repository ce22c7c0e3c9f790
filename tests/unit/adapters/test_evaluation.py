"""Test of evaluations on several ranks: what a script computes from their results is the same on all of them."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from undula.adapters.evaluation import RankBatches
from undula.data.script.loader_processes import Loader


@pytest.mark.parametrize("samples", [16, 18])
@pytest.mark.parametrize("stops_after", [None, 1])
def test_random_numbers_after_an_evaluation_are_those_of_all_ranks(samples: int, stops_after: int | None) -> None:
    def drawn(rank: int, world_size: int) -> list[float]:
        run: Any = SimpleNamespace(
            rank=rank,
            world_size=world_size,
            alive=lambda: None,
            gather=lambda value: [value] * world_size,
            plan=SimpleNamespace(spec=SimpleNamespace(seed=0)),
        )
        numbers = []
        batches = RankBatches(run, TensorDataset(torch.arange(samples)), collate, 4, Loader(0))
        for number, _ in enumerate(batches, start=1):
            torch.rand(rank + 1)  # a dropout of its own
            batches.gathered(0)
            numbers.append(float(np.random.rand()))
            if number == stops_after:
                break
        return [*numbers, float(np.random.rand()), float(torch.rand(()))]

    for world_size in (2, 3):
        assert len({tuple(drawn(rank, world_size)) for rank in range(world_size)}) == 1
    assert drawn(0, 1)[-2:] == drawn(0, 2)[-2:] == drawn(1, 3)[-2:]
    if stops_after is None:
        assert drawn(0, 1)[-2:] != drawn(0, 1)[:2]


def collate(items: list[Any]) -> Tensor:
    return torch.stack([cast(Tensor, item[0]) for item in items])
