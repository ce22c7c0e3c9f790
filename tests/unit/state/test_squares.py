"""Tests of sums of squares: each is the number of float32 that is nearest to the true sum, however tensors are split."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from undula.state import squares
from undula.state.squares import square_sums


def _nearest(values: Tensor) -> float:
    """Return the true sum of squares, rounded to float32, ties to even."""
    total = sum((Fraction(value) ** 2 for value in values.tolist()), Fraction(0))
    near = torch.tensor(float(total), dtype=torch.float32)
    candidates = [near, torch.nextafter(near, torch.tensor(torch.inf)), torch.nextafter(near, torch.tensor(0.0))]
    return min((float(each) for each in candidates), key=lambda each: (abs(Fraction(each) - total), _bits(each) & 1))


def _bits(value: float) -> int:
    return int(torch.tensor(value).view(torch.int32))


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 7))
def test_a_sum_does_not_depend_on_the_split_and_the_order(seed: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = 10 ** (torch.rand(500, generator=generator) * 8 - 6)
    values = torch.randn(500, generator=generator) * scales
    shuffled = values[torch.randperm(500, generator=generator)]
    assert float(square_sums([list(shuffled.chunk(parts))])) == float(square_sums([[values]])) == _nearest(values)


def _sharded(rank: int, world_size: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    values = torch.linspace(-1, 1, 101)
    placements = ([Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Replicate()])
    return [float(square_sums([[distribute_tensor(values, mesh, each)]])) for each in placements]


def test_a_tensor_whose_shards_have_copies_has_the_same_sum() -> None:
    expected = float(square_sums([[torch.linspace(-1, 1, 101)]]))
    assert on_ranks(4, _sharded) == [[expected] * 3] * 4


@pytest.mark.parametrize("extra", [0.0, 2.0**-20, 2.0**-30, 2.0**-37])
def test_a_sum_between_two_numbers_is_rounded_to_even_or_up(extra: float, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(64)
    values[:3] = torch.tensor([1.0, 2.0**-12, 2.0**-12 * extra])
    expected = 1.0 + 2.0**-23 if extra else 1.0
    for order in (torch.arange(64), torch.randperm(64)):
        for parts in (1, 2, 3, 7):
            assert float(square_sums([list(values[order].chunk(parts))])) == expected
    monkeypatch.setattr(squares, "ERROR", 0.1)  # now every sum is computed in integers
    assert float(square_sums([[values]])) == expected


def test_every_kind_of_gradient_has_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.tensor([[1.0], [2.0], [4.0]]), (3, 1))
    groups = [[torch.tensor([3 + 4j])], [sparse], [torch.ones(2, 3).t()], [torch.empty(0)], [torch.tensor(1e-30)]]
    for error in (squares.ERROR, 0.1):
        monkeypatch.setattr(squares, "ERROR", error)
        assert square_sums(groups).tolist() == [25.0, 25.0, 6.0, 0.0, 0.0]
        assert square_sums([[torch.full((2,), 2.0, dtype=torch.bfloat16)]]).tolist() == [8.0]
        assert square_sums([[torch.tensor([torch.inf])], [torch.tensor([1e30])]]).tolist() == [torch.inf, torch.inf]
    assert square_sums([[torch.tensor([torch.nan])]]).isnan().all()
    assert square_sums([[torch.tensor([1e-9], dtype=torch.float64)]]).tolist() == [pytest.approx(1e-18, rel=1e-15)]
