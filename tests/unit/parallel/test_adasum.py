"""Tests of Adasum over virtual workers: the properties in the paper, and the same bits at any number of ranks."""

import pytest
import torch
from engine_steps import ADASUM, placed, step_gradients
from ranks import on_ranks
from torch import Tensor, nn

from undula.parallel.reduce.adasum import adasum


def test_orthogonal_gradients_add_up_and_parallel_ones_are_averaged() -> None:
    one, other = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert adasum(one, other).tolist() == [2.0, 3.0]
    assert adasum(one, one).tolist() == one.tolist()
    assert adasum(one, 3 * one).tolist() == [4.0, 0.0]
    assert adasum(one, torch.zeros(2)).tolist() == one.tolist()
    angle = torch.tensor([1.0, 1.0])
    expected = one * (1 - 2 / (2 * 4)) + angle * (1 - 2 / (2 * 2))
    torch.testing.assert_close(adasum(one, angle), expected)


def _parts(samples: tuple[int, ...], dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a module, and the rows of each virtual worker."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    return module, torch.randn(sum(samples), 3, dtype=dtype).split(samples)


def _gradients(rank: int, world_size: int, samples: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list:
    module, rows = _parts(samples, dtype)
    engine = placed(module, rank, world_size, len(samples), gradient=ADASUM)
    return step_gradients(engine, samples, lambda place: module(rows[place]).abs().square().mean())


def test_the_result_does_not_depend_on_the_ranks() -> None:
    samples = (4, 3, 3, 2, 2)
    (alone,) = on_ranks(1, _gradients, samples)
    for world_size in (2, 3):
        assert on_ranks(world_size, _gradients, samples) == [alone] * world_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("samples", [(4,), (4, 2)])
def test_virtual_workers_are_combined_layer_by_layer_and_gradients_keep_their_precision(
    samples: tuple[int, ...], dtype: torch.dtype
) -> None:
    """For a single virtual worker, the result is its gradient."""
    (found,) = on_ranks(1, _gradients, samples, dtype)
    module, rows = _parts(samples, dtype)
    of_workers = [torch.autograd.grad(module(part).abs().square().mean(), list(module.parameters())) for part in rows]
    for layer, one, *others in zip(found, *of_workers, strict=True):
        if others:
            (other,) = others
            expected = adasum(*map(torch.view_as_real, (one, other))) if dtype.is_complex else adasum(one, other)
            expected = torch.view_as_complex(expected) if dtype.is_complex else expected
            torch.testing.assert_close(torch.tensor(layer, dtype=dtype), expected.flatten(), rtol=1e-5, atol=1e-7)
        else:
            assert layer == one.flatten().tolist()
