"""Shards that wait in host memory: they have the bits of whole models, and everything that belongs to them is there."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from ranks import on_ranks
from sharded_steps import placed, trained
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from undula.parallel.engines import sharded
from undula.parallel.layout import Layout
from undula.parallel.local_step import on_local_parts
from undula.parallel.reduce.unit_sum import UnitSum
from undula.parallel.spec import ShardingSpec
from undula.state import squares
from undula.state.pieces import shard_with


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 1), (3, 2), (2, 3)])
def test_shards_in_host_memory_have_the_bits_of_the_whole_model(world_size: int, stage: int) -> None:
    (expected,) = on_ranks(1, trained, 4, ShardingSpec(), ["AdamW"])
    sharding = ShardingSpec(stage, offload="all")  # type: ignore[arg-type]
    for found in on_ranks(world_size, trained, 4, sharding, ["AdamW"]):
        assert found == expected


def _policies(rank: int, world_size: int, offload: str) -> set[tuple[str, bool]]:
    """Return how torch's fully_shard was told to keep the shards of each unit."""
    given = []
    original = fully_shard

    def recording(module: nn.Module, offload_policy: Any, **others: Any) -> nn.Module:
        given.append((type(offload_policy).__name__, getattr(offload_policy, "pin_memory", False)))
        return original(module, offload_policy=offload_policy, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "fully_shard", recording)
        placed(rank, world_size, 2, ShardingSpec(3, offload=offload))  # type: ignore[arg-type]
    return set(given)


@pytest.mark.parametrize(("offload", "expected"), [("none", "OffloadPolicy"), ("all", "CPUOffloadPolicy")])
def test_torch_keeps_the_shards_where_the_settings_say(offload: str, expected: str) -> None:
    """Memory is pinned for GPUs only."""
    assert on_ranks(1, _policies, offload) == [{(expected, False)}]


def test_the_sum_that_torch_moves_to_host_memory_is_made_there() -> None:
    layout = Layout(0, 2, 0, torch.device("meta"), *[None] * 4)  # type: ignore[arg-type]
    for offloads, expected in ((False, ["meta"] * 4), (True, ["meta", "cpu"] * 2)):
        unit_sum = UnitSum(layout, 4, torch.empty(8), offloads=offloads)
        made = []
        for _ in range(2):
            unit_sum.begin_pass(counts=True, is_last=True)
            made += [unit_sum.allocate((size,), dtype=torch.float32, device=layout.device) for size in (8, 4)]
        assert [tensor.device.type for tensor in made] == expected


def _elsewhere() -> nn.Parameter:
    """Return a shard in host memory, of a tensor over ranks on another device, for which `meta` stands."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "meta")
    sharded: Any = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)])
    parameter = nn.Parameter(torch.empty_like(sharded, device="cpu"))
    assert parameter.device.type == "cpu"
    return parameter


@pytest.mark.usefixtures("process_group")
def test_the_gradient_of_a_shard_in_host_memory_is_there_too() -> None:
    parameter, total = _elsewhere(), torch.arange(6.0).view(3, 2)
    parameter.grad = gradient = shard_with(total, parameter)
    assert gradient.to_local().tolist() == total.tolist()  # type: ignore[operator]


@pytest.mark.usefixtures("process_group")
def test_sums_of_shards_in_host_memory_are_added_up_on_the_device_of_their_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL can only sum tensors on GPUs."""
    devices = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: devices.append(tensor.device.type))
    with pytest.raises(NotImplementedError, match="meta"):  # the sum is wanted in host memory
        squares.square_sums([[_elsewhere()]])
    assert devices == ["meta"]


def test_shards_in_host_memory_of_no_sharded_model_are_refused() -> None:
    with pytest.raises(ValidationError, match="units, gather, copies and offload have no effect with stage=0"):
        ShardingSpec(0, offload="all")


@pytest.mark.usefixtures("process_group")
def test_the_state_that_an_optimizer_makes_for_a_shard_in_host_memory_is_there_too() -> None:
    parameter = _elsewhere()
    parameter.grad = shard_with(torch.ones(3, 2), parameter)
    optimizer = torch.optim.AdamW([parameter])
    with on_local_parts(optimizer):
        optimizer.step()
    moment: Any = optimizer.state[parameter]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.to_local().device.type == "cpu"
    assert torch.allclose(moment.to_local(), torch.tensor(0.1))
