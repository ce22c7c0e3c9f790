"""Tests of the selection of an engine, and of compressed gradients between two ranks."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from engine_steps import ADASUM, FP16, placed, step_gradients
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from undula.errors import UsageError
from undula.parallel.engines.engine import Engine
from undula.parallel.engines.select import sent_as
from undula.parallel.engines.sharded import ShardedEngine
from undula.parallel.reduce.accumulator import Accumulator
from undula.parallel.reduce.adasum import AdasumAccumulator
from undula.parallel.reduce.sharded import ShardedAccumulator
from undula.parallel.reduce.tree import TreeAccumulator
from undula.parallel.spec import Compression, GradientSpec, ShardingSpec

ENGINES: dict[str, tuple[dict[str, Any], Callable[[], nn.Module], type[Engine], type[Accumulator]]] = {
    "plain": ({}, lambda: nn.Linear(2, 1), Engine, TreeAccumulator),
    "sparse": ({}, lambda: nn.Embedding(4, 2, sparse=True), Engine, TreeAccumulator),
    "fp16": ({"gradient": FP16}, lambda: nn.Linear(2, 1), Engine, TreeAccumulator),
    "deterministic": ({"deterministic": True}, lambda: nn.Linear(2, 1), Engine, TreeAccumulator),
    "adasum": ({"gradient": ADASUM}, lambda: nn.Linear(2, 1), Engine, AdasumAccumulator),
    "sharded by the script": ({}, lambda: fully_shard(nn.Linear(2, 1)), ShardedEngine, ShardedAccumulator),
    "sharded": ({"sharding": ShardingSpec(3)}, lambda: nn.Linear(2, 1), ShardedEngine, ShardedAccumulator),
}


def _select(rank: int, world_size: int) -> None:
    for name, (settings, make, engine_type, accumulator) in ENGINES.items():
        engine = placed(make(), rank, world_size, virtual_workers=2, **settings)
        assert (type(engine), type(engine._accumulator)) == (engine_type, accumulator), name
    with pytest.raises(UsageError, match=r"^gradient\.reduce=adasum cannot be combined with a sharded model"):
        placed(fully_shard(nn.Linear(2, 1)), rank, world_size, virtual_workers=2, gradient=ADASUM)


@pytest.mark.parametrize("world_size", [1, 2])
def test_settings_and_model_select_the_engine_and_its_accumulator(world_size: int) -> None:
    on_ranks(world_size, _select)


@pytest.mark.usefixtures("process_group")
def test_parameters_that_are_unfrozen_or_added_later_are_checked_in_the_next_step() -> None:
    base = nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)
    embedding = nn.Embedding(4, 2, sparse=True).requires_grad_(False)
    model = nn.Sequential(embedding, base, nn.Linear(2, 1))
    engine = placed(model, 0, 1, virtual_workers=1, gradient=ADASUM, compute="bf16")
    engine.begin_step([])
    base.requires_grad_(True)
    with pytest.raises(UsageError, match=r"^a model with trainable bfloat16 .* with precision\.compute=bf16, because"):
        engine.begin_step([])
    base.requires_grad_(False)
    engine.begin_step([])
    embedding.requires_grad_(True)
    with pytest.raises(UsageError, match=r"sparse=True.* cannot be combined with gradient\.reduce=adasum"):
        engine.begin_step([])
    embedding.requires_grad_(False)
    model.append(nn.Linear(1, 1, dtype=torch.float16))
    with pytest.raises(UsageError, match=r"^a model with trainable bfloat16 or float16 parameters"):
        engine.begin_step([])


def test_each_compression_has_the_dtype_of_its_name() -> None:
    assert {each: sent_as(each) for each in get_args(Compression)} == {
        "none": None,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
    }
    with pytest.raises(AssertionError):
        sent_as("fp8")  # type: ignore[arg-type]


def _gradients(rank: int, world_size: int, compression: Compression) -> list[list[list[float]]]:
    """Return, for each of three steps, the gradient that this rank computed and the sum that it received."""
    module = nn.Linear(7, 3, bias=False)
    gradient = GradientSpec(compression=compression)
    engine = placed(module, rank, world_size, virtual_workers=world_size, gradient=gradient)
    torch.manual_seed(rank)
    found = []
    for _ in range(3):  # from the second step on, gradients are sent during the backward pass
        rows = torch.randn(4, 7)
        (own,) = torch.autograd.grad(module(rows).square().mean() / world_size, [module.weight])
        (received,) = step_gradients(engine, [4] * world_size, lambda place, rows=rows: module(rows).square().mean())
        found.append([own.flatten().tolist(), received])
    return found


@pytest.mark.parametrize("compression", get_args(Compression))
def test_gradients_are_sent_in_the_dtype_of_the_compression(compression: Compression) -> None:
    first, second = on_ranks(2, _gradients, compression)
    dtype = sent_as(compression) or torch.float32
    for (own, received), (others, received_there) in zip(first, second, strict=True):
        expected = (torch.tensor(own).to(dtype) + torch.tensor(others).to(dtype)).float()
        assert received == received_there == expected.tolist()
        exact = torch.tensor(own) + torch.tensor(others)
        assert (received == exact.tolist()) == (compression == "none")
