"""Tests of Adasum over virtual workers: the properties in the paper, and the same bits at any number of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from torch import nn

from undula.parallel.collectives import all_reduce_over
from undula.parallel.engines.adasum import AdasumEngine
from undula.parallel.layout import join_layout
from undula.parallel.reduce.adasum import adasum, halves, largest_within
from undula.plan.plan import MicroBatch, assign


def test_orthogonal_gradients_add_up_and_parallel_ones_are_averaged() -> None:
    one, other = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert adasum(one, other).tolist() == [2.0, 3.0]
    assert adasum(one, one).tolist() == one.tolist()
    assert adasum(one, 3 * one).tolist() == [4.0, 0.0]
    assert adasum(one, torch.zeros(2)).tolist() == one.tolist()
    angle = torch.tensor([1.0, 1.0])
    expected = one * (1 - 2 / (2 * 4)) + angle * (1 - 2 / (2 * 2))
    torch.testing.assert_close(adasum(one, angle), expected)


@given(st.integers(1, 33), st.integers(1, 9))
def test_ranks_reduce_along_one_tree(virtual_workers: int, world_size: int) -> None:
    shares = assign(virtual_workers, min(world_size, virtual_workers))
    spans = largest_within((0, virtual_workers), shares)
    assert [place for begin, end in spans for place in range(begin, end)] == list(range(virtual_workers))
    assert all(any(share.start <= begin and end <= share.stop for share in shares) for begin, end in spans)
    if virtual_workers > 1:
        (begin, middle), (again, end) = halves((0, virtual_workers))
        assert (begin, middle, end) == (0, again, virtual_workers)
        assert middle >= end - middle


def _gradients(
    rank: int, world_size: int, samples: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[list[complex]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    rows = torch.randn(sum(samples), 3, dtype=dtype).split(samples)
    layout = join_layout(rank, world_size, torch.device("cpu"))
    engine = AdasumEngine(layout, len(samples), all_reduce_over(layout.shards))
    model = engine.place(module)
    mine = layout.virtual_workers(len(samples))
    engine.begin_step(len(mine))
    for place in mine:
        engine.before_forward(is_last=False)
        loss = model(rows[place]).abs().square().mean()
        engine.backward(loss, samples[place] / sum(samples), MicroBatch(0, place, 0, samples[place]), is_last=False)
    engine.finish_gradients(sum(samples), max_norm=None)
    return [parameter.grad.flatten().tolist() for parameter in module.parameters()]


def test_the_result_does_not_depend_on_the_ranks() -> None:
    samples = (4, 3, 3, 2, 2)
    (alone,) = on_ranks(1, _gradients, samples)
    for world_size in (2, 3):
        assert on_ranks(world_size, _gradients, samples) == [alone] * world_size


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_keep_their_precision(dtype: torch.dtype) -> None:
    """For a single virtual worker, the result is its gradient."""
    (found,) = on_ranks(1, _gradients, (4,), dtype)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    module(torch.randn(4, 3, dtype=dtype)).abs().square().mean().backward()
    assert found == [parameter.grad.flatten().tolist() for parameter in module.parameters()]


def test_two_virtual_workers_are_combined_layer_by_layer() -> None:
    (found,) = on_ranks(1, _gradients, (4, 2))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    gradients = []
    for rows in torch.randn(6, 3).split((4, 2)):
        gradients.append(torch.autograd.grad(module(rows).square().mean(), list(module.parameters())))
    for layer, one, other in zip(found, *gradients, strict=True):
        torch.testing.assert_close(torch.tensor(layer), adasum(one, other).flatten(), rtol=1e-5, atol=1e-7)
