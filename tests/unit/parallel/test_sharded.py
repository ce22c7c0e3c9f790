"""Tests of models that torch's `fully_shard` has sharded: they train like whole models, and no rank has the whole state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import placed
from numbers_job import network
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from undula.errors import UsageError
from undula.parallel.layout import join_layout
from undula.recovery.live_state import LiveState
from undula.recovery.offers import Offer
from undula.recovery.restore import Restorer
from undula.recovery.snapshot import find_snapshots
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.state.checkpoint import Checkpointer
from undula.state.model_state import model_and_optimizer_state
from undula.state.pieces import rank_state
from undula.storage import Store


def whole(module: nn.Module) -> dict[str, list[float]]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()
        for name, value in module.named_parameters()
    }


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(is_sharded=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _write(rank: int, world_size: int, folder: str, steps_of: list[list[int]]) -> dict[int, dict[str, Any]]:
    model, optimizer = trained()
    writer = SnapshotWriter(Path(folder), "plan", 1, rank)
    found = {}
    for step in (5, 6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(step)
        found[step] = whole(model)
        if step in steps_of[rank]:
            writer.begin(step, rank_state(model_and_optimizer_state(model, optimizer)), {}, [])
            writer.wait()
    assert writer.problem is None
    return found


def _read(rank: int, world_size: int, folder: str) -> tuple[int, dict[str, Any], bool]:
    model, optimizer = network(is_sharded=True), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    layout = join_layout(rank, world_size, torch.device("cpu"))
    checkpoints = Checkpointer(Store(f"{folder}/run"), layout.control, 2, keep=2)

    def find() -> list[Any]:  # each rank is on a different node
        return [Offer(each) for each in find_snapshots(Path(folder), "plan")[rank::world_size]]

    restored = Restorer(LiveState(model, optimizer), checkpoints, "plan", 2, layout, find).restore(None)
    moments = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
    return restored.step, whole(model), any(bool(moment.any()) for moment in moments)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("steps_of", "step"), [([[5, 6]], 6), ([[5, 6], [5, 6]], 6), ([[5, 6], [5]], 5), ([[6], [5]], 0)]
)
def test_shards_of_all_ranks_form_a_state_for_any_number_of_ranks(
    tmp_path: Path, world_size: int, steps_of: list[list[int]], step: int
) -> None:
    written = on_ranks(len(steps_of), _write, str(tmp_path), steps_of)[0]
    for found_step, weights, has_moments in on_ranks(world_size, _read, str(tmp_path)):
        assert found_step == step
        assert has_moments == (step > 0)
        assert step == 0 or weights == written[step]


def test_a_partly_sharded_module_is_refused() -> None:
    on_ranks(1, _partly_sharded)


def _partly_sharded(rank: int, world_size: int) -> None:
    module = nn.Sequential(nn.Linear(1, 2))
    fully_shard(module[0])
    with pytest.raises(UsageError, match=r"sharded submodules but is not sharded itself"):
        placed(module, rank, world_size, virtual_workers=1)
    module = nn.Sequential(nn.Linear(1, 2))
    fully_shard(module, ignored_params={module[0].bias})
    with pytest.raises(UsageError, match=r"parameter '0\.bias' is not sharded"):
        placed(module, rank, world_size, virtual_workers=1)


def test_weights_that_depend_on_the_number_of_workers_are_refused() -> None:
    on_ranks(2, _made_after_sharding)


def _made_after_sharding(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(16, 8))
    fully_shard(module)
    module.to_empty(device="cpu")
    module[0].reset_parameters()
    with pytest.raises(UsageError, match="each rank has drawn its shards like a model of its own"):
        placed(module, rank, world_size, virtual_workers=1)
