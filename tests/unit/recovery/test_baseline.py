"""Tests of what is known of a state at a step boundary: what can be put back, and which changes of parameters are noticed."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from undula.recovery.baseline import Baseline


class Model(nn.Module):
    """Parameters of several sizes and dtypes, buffers and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(100, 50))
        self.small = nn.Parameter(torch.randn(3).double())
        self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.part = nn.Parameter(torch.randn(30, 20)[:, :8])
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("late", None)
        self.calls = [0]

    def get_extra_state(self) -> object:
        return self.calls

    def set_extra_state(self, state: list[int]) -> None:
        self.calls = state


def taken() -> tuple[Model, torch.optim.Optimizer, Baseline]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    baseline = Baseline(model, optimizer)
    baseline.take()
    return model, optimizer, baseline


def decay(model: Model) -> None:
    """Change a parameter in a way that torch does not count."""
    model.large.data.mul_(0.999)


def swap(model: Model) -> None:
    with torch.no_grad():
        model.complex.copy_(torch.zeros(4))


def assign(model: Model) -> None:
    model.small.data = model.small.data * 2


def break_up(model: Model) -> None:
    model.large.data = torch.full((100, 50), float("nan"))


def halve(model: Model) -> None:
    """Give a part of the model another dtype, as an evaluation in half precision does."""
    model.large.data = model.large.data.half()


def write_part(model: Model) -> None:
    model.part.data.fill_(7.0)


def negate_column(model: Model) -> None:
    """Change the sign of an even number of elements, which is the highest bit of words of 64 bits."""
    model.large.data[:, 1].neg_()


def negate_two(model: Model) -> None:
    model.small.data[:2].neg_()


def exchange_rows(model: Model) -> None:
    model.large.data[[3, 60]] = model.large.data[[60, 3]]


def write_with_numpy(model: Model) -> None:
    model.large.detach().numpy()[99, 49] += 1e-3


@pytest.mark.parametrize(
    "change",
    [
        *(decay, swap, assign, break_up, halve, write_part),
        *(negate_column, negate_two, exchange_rows, write_with_numpy),
    ],
    ids=lambda change: str(change.__name__),
)
def test_changed_parameters_are_noticed(change: Callable[[Model], None]) -> None:
    model, _, baseline = taken()
    assert baseline.is_intact
    change(model)
    assert not baseline.is_intact
    baseline.take()
    assert baseline.is_intact


def test_parameters_that_are_as_before_count_as_intact_wherever_they_are() -> None:
    model, _, baseline = taken()
    own = model.large.detach().clone()
    model.large.data.zero_()
    model.large.data = own
    assert baseline.is_intact


def test_nothing_is_known_of_a_state_within_an_update() -> None:
    _, _, baseline = taken()
    baseline.drop()
    assert not baseline.is_intact


def test_buffers_extra_state_and_settings_are_put_back() -> None:
    model, optimizer, baseline = taken()
    for number in range(2):  # the second time into the same memory
        mean = model.norm.running_mean
        assert mean is not None
        model.norm.running_mean = mean + 1
        model.norm.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        model.late = torch.ones(3)
        model.calls[0] += 1
        optimizer.param_groups[0]["momentum"] = 0.9
        baseline.put_back()
        assert model.norm.running_mean is mean
        assert mean.tolist() == [0.0, 0.0]
        assert model.norm.num_batches_tracked == 0
        assert model.late is None
        assert model.calls == [0], number
        assert optimizer.param_groups[0]["momentum"] == 0
        baseline.take()
