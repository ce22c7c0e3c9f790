"""Table of what torch's `fully_shard` lets a script switch, and norms of shards: right at any number of ranks, or refused."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import sharded_steps
import torch
from night import at_night
from ranks import on_ranks
from sharded_steps import Tied, loss_of, placed, plan_of, run_step, trained, whole
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from undula.errors import UsageError
from undula.parallel.fsdp_methods import METHODS
from undula.parallel.spec import ShardingSpec

CALLS: Mapping[str, Callable[[Any, bool], object]] = {
    "reshard": lambda part, is_odd: part.reshard(),
    "set_is_last_backward": lambda part, is_odd: part.set_is_last_backward(is_odd),
    "set_modules_to_backward_prefetch": lambda part, is_odd: part.set_modules_to_backward_prefetch([part]),
    "set_modules_to_forward_prefetch": lambda part, is_odd: part.set_modules_to_forward_prefetch([part]),
    "set_post_optim_event": lambda part, is_odd: None,  # of a GPU
    "set_reduce_scatter_max_input_buffers": lambda part, is_odd: part.set_reduce_scatter_max_input_buffers(1),
    "set_requires_all_reduce": lambda part, is_odd: part.set_requires_all_reduce(is_odd),
    "set_requires_gradient_sync": lambda part, is_odd: part.set_requires_gradient_sync(is_odd),
    "unshard": lambda part, is_odd: part.unshard(),
}
"""Calls of the methods that are not refused; `is_odd` differs between the batches of a rank, and between ranks."""


def test_the_table_has_all_public_methods_of_torch() -> None:
    assert {name for name in dir(FSDPModule) if not name.startswith("_") and name not in dir(nn.Module)} == set(METHODS)
    assert {name for name, effect in METHODS.items() if effect != "is refused"} == set(CALLS)
    known = {"device_mesh", "from_local", "full_tensor", "placements", "redistribute", "to_local"}
    assert {name for name in vars(DTensor) if not name.startswith("_") and name not in dir(torch.Tensor)} == known


def _calling(name: str, model: nn.Module, step: int, virtual_worker: int, number: int) -> torch.Tensor:
    for part in model.modules():
        if isinstance(part, FSDPModule):
            CALLS[name](part, (virtual_worker + number) % 2 == 1)
    return loss_of(model, step, virtual_worker, number)


def _trained(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    found = {}
    for name in CALLS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_steps, "loss_of", partial(_calling, name))
            found[name] = trained(rank, world_size, 4, ShardingSpec(stage), ["SGD"])  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("world_size", "stage"), [*at_night([(1, 3), (2, 1), (3, 2)]), (2, 3)])
def test_a_call_in_each_batch_leaves_the_bits_of_the_whole_model(world_size: int, stage: int) -> None:
    (expected,) = on_ranks(1, trained, 4, ShardingSpec(), ["SGD"])
    for found in on_ranks(world_size, _trained, stage):
        for name in CALLS:
            assert found[name] == expected, name


def _refused(rank: int, world_size: int) -> list[str]:
    engine, messages = placed(rank, world_size, 2, ShardingSpec(3)), []
    for name, effect in METHODS.items():
        if effect == "is refused":
            with pytest.raises(UsageError) as error:
                getattr(engine.module, name)(False)
            messages.append(str(error.value).split("(")[0])
    engine.close()
    engine.module.set_reshard_after_forward(True)  # type: ignore[operator]
    return messages


def test_what_decides_how_gradients_travel_is_refused_by_its_name_until_the_run_has_ended() -> None:
    assert on_ranks(1, _refused) == [[name for name, effect in METHODS.items() if effect == "is refused"]]


def _set_before(rank: int, world_size: int) -> list[Any]:
    """Return the weights after a step of a model of the script, which has switched everything off."""

    def make() -> nn.Module:
        model: Any = Tied()
        for block in (*model.blocks, model):
            fully_shard(block)
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
        model.set_gradient_divide_factor(3.0)
        return model  # type: ignore[no-any-return]

    engine = placed(rank, world_size, 4, ShardingSpec(), make=make)  # type: ignore[arg-type]
    engine.prepare(engine.module, torch.optim.SGD(engine.module.parameters(), lr=0.1))
    run_step(engine, plan_of(4), 0)
    engine.step()
    return [*map(whole, engine.parameters)]


def _unsharded(rank: int, world_size: int) -> list[Any]:
    engine = placed(rank, world_size, 4, ShardingSpec())
    engine.prepare(engine.module, torch.optim.SGD(engine.module.parameters(), lr=0.1))
    run_step(engine, plan_of(4), 0)
    engine.step()
    return [*map(whole, engine.parameters)]


def test_what_a_script_has_set_before_the_run_does_not_decide_its_gradients() -> None:
    (expected,) = on_ranks(1, _unsharded)
    assert on_ranks(2, _set_before) == [expected] * 2


def _clipped(rank: int, world_size: int, stage: int) -> list[Any]:
    """Return norms that the script takes of the gradient, and the weights after it has clipped them, by kind of norm."""
    found = []
    for norm_type, foreach in ((2.0, None), (2.0, False), (1.0, True), (float("inf"), None)):
        engine = placed(rank, world_size, 4, ShardingSpec(stage))  # type: ignore[arg-type]
        engine.prepare(engine.module, torch.optim.SGD(engine.module.parameters(), lr=0.1))
        for step in range(2):
            run_step(engine, plan_of(4), step)
            norm = nn.utils.clip_grad_norm_(engine.module.parameters(), 0.05, norm_type, foreach=foreach)
            engine.step()
            found.append((norm.item(), [parameter.norm().item() for parameter in engine.parameters]))
        found.append([*map(whole, engine.parameters)])
        engine.close()
    return found


@pytest.mark.parametrize(("world_size", "stage"), [*at_night([(1, 3), (2, 3)]), (3, 1)])
def test_clipping_by_hand_has_the_bits_of_the_whole_model(world_size: int, stage: int) -> None:
    (expected,) = on_ranks(1, _clipped, 0)
    assert on_ranks(world_size, _clipped, stage) == [expected] * world_size
