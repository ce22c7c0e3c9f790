"""Tests of the reduction of sums, buffers and gradients over gloo between processes, with any assignment of the work."""

import math
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_steps import placed, step_gradients
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from undula.errors import UsageError
from undula.parallel.layout import join_layout
from undula.plan.tree import assign
from undula.train.buffers import BufferMean
from undula.train.step_reduction import LocalStep, StepReducer, StepTotals, Wants


def _reduce(rank: int, world_size: int) -> list[StepTotals]:
    reducer = StepReducer(dist.group.WORLD)
    first = LocalStep(losses=[rank + 1.0], sample_digest=2**64 - 1 - rank, logged={f"only rank {rank}": [(1.5, 2.0)]})
    wants = Wants(leaves=rank == 1, has_saved=rank > 0)
    second = LocalStep(losses=[], sample_digest=0, logged={"shared": [(float(rank), 1.0)]}, wants=wants)
    second.seconds |= {"data_s": 0.25 * rank, "compute_s": 0.5 * rank, "communication_s": 8.0}
    return [reducer.reduce(first), reducer.reduce(second)]


def test_sums_are_exact_and_digests_wrap_at_64_bits() -> None:
    results = on_ranks(3, _reduce)
    assert results[0] == results[1] == results[2]
    first, second = results[0]
    assert first.losses == 1 + 2 + 3
    assert first.sample_digest == sum(2**64 - 1 - rank for rank in range(3)) % 2**64
    assert first.logged == {f"only rank {rank}": 1.5 for rank in range(3)}
    assert second.logged == {"shared": 1.0}
    assert second.wants == Wants(leaves=True)
    assert (first.seconds["wait_s"], second.seconds["wait_s"]) == (0.0, 0.75)  # for the last rank, ready after 1.5 s


SHARES = (4, 4, 3, 3, 2)
"""Samples of five virtual workers, which are assigned unevenly to 2, 3 and 4 ranks."""


def _train_step(rank: int, world_size: int, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Return the gradients and the buffers of a model with BatchNorm after the second step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)
    rows = torch.randn(sum(SHARES), 5, dtype=dtype).split(SHARES)
    engine = placed(module, rank, world_size, len(SHARES))
    buffers = BufferMean(module, engine.layout, len(SHARES))

    def loss_of(place: int) -> torch.Tensor:
        buffers.begin_micro_batch()
        loss = module(rows[place]).square().mean()
        buffers.end_micro_batch(SHARES[place], place)
        return loss

    for _ in range(2):
        buffers.begin_step(0, 1)
        gradients = step_gradients(engine, SHARES, loss_of)
        buffers.end_step(sum(SHARES))
    return list(chain(*gradients)), [float(value) for buffer in module.buffers() for value in buffer.flatten()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_and_buffers_have_the_same_bits_at_any_world_size(dtype: torch.dtype) -> None:
    (alone,) = on_ranks(1, _train_step, dtype)
    for world_size in (2, 3, 4, 5):
        assert on_ranks(world_size, _train_step, dtype) == [alone] * world_size


def _losses_in_parts(rank: int, world_size: int, losses: list[float]) -> float:
    reducer = StepReducer(dist.group.WORLD)
    own = assign(len(losses), world_size)[rank]
    return reducer.reduce(LocalStep(losses=[losses[place] for place in own])).losses / 7


def test_the_loss_of_a_step_is_the_same_bit_for_bit_at_any_world_size() -> None:
    losses = [0.1, 1e17, -1e17, 3e-9, 2.7, 1 / 3]
    (alone,) = on_ranks(1, _losses_in_parts, losses)
    assert alone == math.fsum(losses) / 7
    for world_size in (2, 3, 4):
        assert on_ranks(world_size, _losses_in_parts, losses) == [alone] * world_size
    large = [1e30, 3.3e29, -1e30, 7.7e15, 0.1]
    for world_size in (1, 2, 3, 5):
        assert on_ranks(world_size, _losses_in_parts, large) == [math.fsum(large) / 7] * world_size
    assert str(on_ranks(2, _losses_in_parts, [1.0, float("nan")])) == "[nan, nan]"
    assert on_ranks(2, _losses_in_parts, [1e300, 1e300]) == [2e300 / 7] * 2


def _logged_constants(rank: int, world_size: int, values: list[float]) -> list[float]:
    """Return the means of values that count for 5 samples on each of six virtual workers."""
    logged = {str(place): [(value, 5.0)] * len(assign(6, world_size)[rank]) for place, value in enumerate(values)}
    return [*StepReducer(dist.group.WORLD).reduce(LocalStep(logged=logged)).logged.values()]


def test_values_of_a_step_are_logged_as_they_are_at_any_world_size() -> None:
    values = [0.1, 1 / 3, 1e-10, 5e-324, 1e300]
    for world_size in (1, 2, 3, 4):
        for logged in on_ranks(world_size, _logged_constants, values):
            assert logged == values


def _constant_buffers(rank: int, world_size: int) -> list[list[float]]:
    module = nn.Module()
    for name, buffer in {
        "mask": torch.tensor([0.0, -torch.inf]),
        "table": torch.linspace(0, 1, 7),
        "empty": torch.empty(0).double(),
    }.items():
        module.register_buffer(name, buffer)
    buffers = BufferMean(module, join_layout(rank, world_size, torch.device("cpu")), world_size)
    for _ in range(50):
        buffers.begin_step(0, 1)
        buffers.begin_micro_batch()
        buffers.end_micro_batch([3, 0][rank], rank)  # the second rank has no samples
        buffers.end_step(3)
    return [buffer.tolist() for buffer in module.buffers()]


def test_unchanged_buffers_keep_their_values() -> None:
    for mask, table, _ in on_ranks(2, _constant_buffers):
        assert mask == [0.0, -torch.inf]
        assert table == torch.linspace(0, 1, 7).tolist()


class _Pause(torch.autograd.Function):
    """Identity whose backward pass takes longer than an all-reduce of small gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.2)
        return gradient


class _RunsTwice(nn.Module):
    """Module with a layer to whose gradient a backward pass adds twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = _Pause.apply(self.first(values))
        for _ in range(2):
            values = checkpoint(self.layer, values, use_reentrant=True)
        return self.last(values).mean()


class _Tied(nn.Module):
    """Module that uses the weight of a sparse embedding densely as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 5, sparse=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (self.embedding(torch.arange(3)) @ self.embedding.weight.T).sum() * values.mean()


class _Branch(nn.Module):
    """Module that uses a layer only for values with a positive mean."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output = self.always(values) + (self.sometimes(values) if values.mean() > 0 else 0)
        return output.mean()


def _gradients(rank: int, world_size: int, kind: Callable[[], nn.Module]) -> list[list[list[float] | None]]:
    """Return the gradients of two steps of two virtual workers. The second virtual worker has no share of the second step."""
    torch.manual_seed(0)
    module = kind()
    engine = placed(module, rank, world_size, virtual_workers=2)

    def loss_of(place: int) -> torch.Tensor:
        # Only the samples of the first virtual worker have a negative mean.
        values = torch.randn(2, 5).abs() if place else -torch.ones(2, 5)
        return module(values.requires_grad_())

    return [step_gradients(engine, samples, loss_of) for samples in ((1, 1), (2, 0))]


@pytest.mark.parametrize("kind", [_RunsTwice, _Tied, _Branch])
def test_any_model_has_the_gradients_of_one_rank(kind: Callable[[], nn.Module]) -> None:
    (alone,) = on_ranks(1, _gradients, kind)
    for found in on_ranks(2, _gradients, kind):
        for own, expected in zip(found, alone, strict=True):
            assert own == expected


class _Statistics(nn.Module):
    """Module with a buffer that each forward pass replaces, and one that the first forward pass sets."""

    mean: torch.Tensor
    scale: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("scale", None)

    def forward(self, values: torch.Tensor, sets_scale: bool = True) -> None:
        self.mean = 0.5 * self.mean + values.mean()
        if self.scale is None and sets_scale:
            self.scale = values.std().reshape(1)


def _statistics(rank: int, world_size: int, sets_scale: bool = True) -> list[float] | str:
    """Run two steps on micro-batches of one virtual worker each. The second step has no samples for the second half of them."""
    torch.manual_seed(0)
    data, module = torch.randn(4, 3), _Statistics()
    buffers = BufferMean(module, join_layout(rank, world_size, torch.device("cpu")), virtual_workers=4)
    for sizes in ((3, 3, 3, 3), (3, 3, 0, 0)):
        buffers.begin_step(0, 1)
        for place in assign(4, world_size)[rank]:
            buffers.begin_micro_batch()
            module(data[place] * sum(sizes), sets_scale or rank == 0)
            buffers.end_micro_batch(sizes[place], place)
        try:
            buffers.end_step(sum(sizes))
        except UsageError as error:
            return str(error)
    assert module.scale is not None
    return [float(module.mean), float(module.scale)]


def test_buffers_that_a_forward_pass_replaces_or_sets_do_not_depend_on_the_world_size() -> None:
    (alone,) = on_ranks(1, _statistics)
    for world_size in (2, 4):
        assert on_ranks(world_size, _statistics) == [alone] * world_size


def test_a_buffer_that_only_some_ranks_set_is_refused() -> None:
    for message in on_ranks(2, _statistics, False):
        assert "the forward pass set the buffer 'scale', which was None, on some workers only" in str(message)


def test_a_buffer_that_a_forward_pass_makes_elsewhere_is_summed_on_the_device_of_the_model() -> None:
    """The meta device stands for a GPU, because NCCL cannot sum tensors in host memory."""
    module = _Statistics().to("meta")
    buffers = BufferMean(module)
    buffers.begin_step(0, 1)
    buffers.begin_micro_batch()
    module.scale = torch.ones(1)
    buffers.end_micro_batch(1, 0)
    assert [value.device.type for value in buffers._new.values()] == ["meta"]
