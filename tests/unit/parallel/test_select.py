"""Tests of the selection of an engine, and of compressed gradients between two ranks."""

from importlib.util import find_spec
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from undula.errors import UsageError
from undula.parallel.engines.select import make_engine, sent_as
from undula.parallel.layout import join_layout
from undula.parallel.spec import Compression, EngineName, GradientSpec
from undula.plan.plan import MicroBatch

PLAIN = GradientSpec()


def _engines(rank: int, world_size: int, with_horovod: bool) -> dict[str, str]:
    layout = join_layout(rank, world_size, torch.device("cpu"))

    def made(
        module: nn.Module,
        engine: EngineName = "torch",
        deterministic: bool = False,
        gradient: GradientSpec = PLAIN,
    ) -> str:
        found = make_engine(module, layout, engine, deterministic, gradient, measures_noise=False, virtual_workers=2)
        return type(found).__name__

    found = {
        "plain": made(nn.Linear(2, 1)),
        "sparse": made(nn.Embedding(4, 2, sparse=True)),
        "fp16": made(nn.Linear(2, 1), gradient=GradientSpec(compression="fp16")),
        "deterministic": made(nn.Linear(2, 1), deterministic=True),
        "adasum": made(nn.Linear(2, 1), gradient=GradientSpec(reduce="adasum")),
        "sharded": made(fully_shard(nn.Linear(2, 1))),
    }
    if with_horovod:
        found |= {
            "horovod": made(nn.Linear(2, 1), "horovod"),
            "deterministic, horovod": made(nn.Linear(2, 1), "horovod", deterministic=True),
        }
    with pytest.raises(UsageError, match=r"sparse=True.* cannot be combined with deterministic=true"):
        made(nn.Embedding(4, 2, sparse=True), deterministic=True)
    return found


def test_settings_and_model_select_the_engine() -> None:
    with_horovod = find_spec("horovod") is not None
    (found,) = on_ranks(1, _engines, with_horovod)
    expected = {
        "plain": "DataParallelEngine",
        "sparse": "DataParallelEngine",
        "fp16": "DataParallelEngine",
        "deterministic": "ExactEngine",
        "adasum": "AdasumEngine",
        "sharded": "FSDPEngine",
    }
    with_it = {"horovod": "HorovodEngine", "deterministic, horovod": "ExactEngine"}
    assert found == expected | (with_it if with_horovod else {})


@pytest.mark.usefixtures("process_group")
def test_parameters_that_are_unfrozen_or_added_later_are_checked_in_the_next_step() -> None:
    base = nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)
    embedding = nn.Embedding(4, 2, sparse=True).requires_grad_(False)
    model = nn.Sequential(embedding, base, nn.Linear(2, 1))
    layout = join_layout(0, 1, torch.device("cpu"))
    engine = make_engine(model, layout, "torch", True, PLAIN, measures_noise=False, virtual_workers=1, compute="bf16")
    engine.place(model)
    engine.begin_step(1)
    base.requires_grad_(True)
    with pytest.raises(UsageError, match=r"^a model with trainable bfloat16 .* with precision\.compute=bf16, because"):
        engine.begin_step(1)
    base.requires_grad_(False)
    engine.begin_step(1)
    embedding.requires_grad_(True)
    with pytest.raises(UsageError, match=r"sparse=True.* cannot be combined with deterministic=true"):
        engine.begin_step(1)
    embedding.requires_grad_(False)
    model.append(nn.Linear(1, 1, dtype=torch.float16))
    with pytest.raises(UsageError, match=r"^a model with trainable bfloat16 or float16 parameters"):
        engine.begin_step(1)


def test_each_compression_has_the_dtype_of_its_name() -> None:
    assert {each: sent_as(each) for each in get_args(Compression)} == {"none": None, "fp16": torch.float16}
    with pytest.raises(AssertionError):
        sent_as("fp8")  # type: ignore[arg-type]


def _gradients(rank: int, world_size: int, compression: Compression) -> list[list[list[float]]]:
    """Return, for each of two steps, the gradient that this rank computed and the sum that it received."""
    layout = join_layout(rank, world_size, torch.device("cpu"))
    spec = GradientSpec(compression=compression)
    engine = make_engine(
        nn.Linear(7, 3), layout, "torch", False, spec, measures_noise=False, virtual_workers=world_size
    )
    model = engine.place(nn.Linear(7, 3, bias=False))
    torch.manual_seed(rank)
    found = []
    for _ in range(2):  # the second step sends its gradients during the backward pass
        rows = torch.randn(4, 7)
        engine.begin_step(1)
        engine.before_forward(is_last=True)
        loss = model(rows).square().mean()
        own = torch.autograd.grad(loss / world_size, [model.weight], retain_graph=True)[0]
        engine.backward(loss, 1 / world_size, MicroBatch(0, rank, 0, 4), is_last=True)
        engine.finish_gradients(4 * world_size, max_norm=None)
        assert model.weight.grad is not None
        assert model.weight.grad.dtype == torch.float32
        found.append([own.flatten().tolist(), model.weight.grad.flatten().tolist()])
        engine.free_gradients()
    assert dist.get_backend() == "gloo"
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
