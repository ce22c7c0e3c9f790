"""Steps of optimizers on the local parts of shards."""

from types import MethodType
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from undula.parallel.local_step import on_local_parts
from undula.parallel.sharding import has_own_step, place_gradients
from undula.state.pieces import piece_of


def _sharded() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    fully_shard(module, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    return module


def _step(rank: int, world_size: int) -> tuple[bool, bool, list[Any]]:
    module = _sharded()
    optimizer = torch.optim.AdamW(module.parameters())
    params = optimizer.param_groups[0]["params"]
    are_plain = []
    for _ in range(2):  # the first step makes the state, the second one changes it
        with on_local_parts(optimizer):
            are_plain += [not isinstance(each, DTensor) for each in optimizer.param_groups[0]["params"]]
            optimizer.step()
    moments: list[Any] = [optimizer.state[each]["exp_avg"] for each in module.parameters()]
    is_put_back = optimizer.param_groups[0]["params"] is params and list(optimizer.state) == params
    are_shards = all(isinstance(each, DTensor) for each in moments)
    return all(are_plain), is_put_back and are_shards, [each.full_tensor().tolist() for each in moments]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_on_local_parts_leaves_shards(ranks: int) -> None:
    for are_plain, are_shards, moments in on_ranks(ranks, _step):
        assert are_plain
        assert are_shards
        whole = [torch.tensor(each) for each in moments]
        assert [tuple(each.shape) for each in whole] == [(5, 3), (5,), (1, 5), (1,)]
        assert all(torch.allclose(each, torch.tensor(0.19)) for each in whole)


def _failing_step(rank: int, world_size: int) -> bool:
    module = _sharded()
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    with pytest.raises(KeyError), on_local_parts(optimizer):
        raise KeyError
    return all(isinstance(each, DTensor) for each in optimizer.param_groups[0]["params"])


def test_a_step_that_fails_puts_the_shards_back() -> None:
    assert on_ranks(1, _failing_step) == [True]


def _offsets(rank: int, world_size: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = [torch.zeros(sizes) for sizes in ((1,), (2, 3), (4, 2), (5, 1), (9, 4))]
    shards: list[Any] = [distribute_tensor(each, mesh, [Shard(each.dim() - 1)]) for each in tensors]
    shards += [distribute_tensor(each, mesh, [placement]) for each in tensors for placement in (Shard(0), Replicate())]
    return [(piece_of(each).offsets, tuple(each.__create_chunk_list__()[0].offsets)) for each in shards]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_begin_where_torch_says(ranks: int) -> None:
    for of_rank in on_ranks(ranks, _offsets):
        for own, torchs in of_rank:
            assert own == torchs


def _own_step(self: torch.optim.SGD) -> None:
    """Stand for a step of the script."""


def test_steps_and_hooks_of_the_script_are_not_taken_for_those_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    assert not has_own_step(optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert not has_own_step(optimizer), "a scheduler counts steps"
    hook = register_optimizer_step_post_hook(lambda *_: None)
    assert has_own_step(optimizer)
    hook.remove()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    vars(optimizer)["step"] = MethodType(_own_step, optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert has_own_step(optimizer)


def _other_gradients(rank: int, world_size: int) -> list[Any]:
    module = _sharded()
    weight: Any = next(module.parameters())
    weight.grad = weight.grad.redistribute(placements=[Replicate()]) * 2
    place_gradients(module.parameters())
    return [tuple(weight.grad.placements), weight.grad.to_local().shape == weight.to_local().shape]


def test_a_gradient_that_the_script_has_replaced_is_sharded_like_its_parameter() -> None:
    for placements, has_its_shape in on_ranks(2, _other_gradients):
        assert placements == (Shard(0),)
        assert has_its_shape
