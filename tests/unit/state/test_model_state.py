"""Tests of the state of a model and its optimizer: it is exact, its names do not depend on wrappers, or it is refused."""

import io
import json
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from undula.errors import CheckpointError, UsageError
from undula.state.model_state import (
    check_shapes,
    check_state,
    empty_like_saved,
    load_state,
    model_and_optimizer_state,
    model_shapes,
)
from undula.state.pieces import TensorSpec, piece_of, spec_of


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as a checkpoint loads it: copies of the tensors, and values converted through JSON."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else json.loads(json.dumps(value))
        for name, value in state.items()
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def moved(model: nn.Module, optimizer: torch.optim.Optimizer, fresh: nn.Module, other: torch.optim.Optimizer) -> None:
    """Restore the state of a model and its optimizer into others, by way of a checkpoint."""
    restored(fresh, other, stored(model_and_optimizer_state(model, optimizer)))


def restored(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a stored state into a new model and optimizer, as a restore does."""
    table = {name: spec_of(piece_of(value)) for name, value in state.items() if isinstance(value, Tensor)}
    targets = empty_like_saved(model, optimizer, table)
    for name, target in targets.items():
        target.copy_(state[name])
    load_state(model, optimizer, {**state, **targets})


class Scaled(nn.Linear):
    """Layer with a tensor in its extra state, and a buffer that training sets."""

    late: Tensor | None

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("late", None)

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"largest": torch.ones(3)}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        pass


def trained(module: Scaled) -> Scaled:
    module.late = torch.ones(5)
    return module


@pytest.mark.parametrize(
    "wrap", [lambda module: module, torch.compile, nn.Sequential], ids=["bare", "compiled", "inside"]
)
def test_a_state_of_the_same_model_has_its_shapes(wrap: Callable[[nn.Module], nn.Module]) -> None:
    for saved in (wrap(Scaled()), wrap(trained(Scaled()))):
        state = model_and_optimizer_state(saved, torch.optim.SGD(saved.parameters()))
        shapes = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
        check_shapes(model_shapes(wrap(Scaled())), shapes, "the checkpoint")


@pytest.mark.parametrize(
    ("saved", "difference"),
    [
        ({"weight": (4, 3)}, "lacks 'bias', which the model has"),
        ({"weight": (3, 4), "bias": (4,)}, r"'weight' has shape \(3, 4\), .* shape \(4, 3\)"),
        ({"weight": (4, 3), "bias": (4,), "more": ()}, "has 'more', which the model lacks"),
    ],
)
def test_a_state_of_another_model_is_refused_with_the_difference(
    saved: dict[str, tuple[int, ...]], difference: str
) -> None:
    with pytest.raises(CheckpointError, match=f"^step 3 is from another model: .*{difference}"):
        check_shapes(model_shapes(Scaled()), {f"model.{name}": shape for name, shape in saved.items()}, "step 3")


def test_names_are_those_of_the_users_module() -> None:
    model = network()
    state = model_and_optimizer_state(model, torch.optim.AdamW(model.parameters()))
    wrapped = torch.compile(model, backend="eager")
    inner = nn.Sequential(*(torch.compile(each, backend="eager") for each in model))  # type: ignore[arg-type]
    for other in (wrapped, inner):
        assert model_and_optimizer_state(other, torch.optim.AdamW(model.parameters())).keys() == state.keys()


def test_the_state_shares_memory_with_the_model_and_reading_it_changes_nothing() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    before = stored(model_and_optimizer_state(model, optimizer))
    assert not optimizer.state
    assert not [name for name in before if name.startswith("optimizer.state.")]
    assert all(torch.equal(each, before[f"model.{name}"]) for name, each in model.state_dict().items())
    step(model, optimizer)
    state = model_and_optimizer_state(model, optimizer)
    step(model, optimizer)
    assert torch.equal(state["model.0.weight"], model[0].weight)  # type: ignore[index]
    assert state["optimizer.state.0.weight.step"].item() == 2


def test_a_parameter_without_gradient_has_no_state_before_and_after_a_restore() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model[2].requires_grad_(False)  # type: ignore[index]
    step(model, optimizer)
    fresh = network()
    other = torch.optim.AdamW(fresh.parameters())
    moved(model, optimizer, fresh, other)
    assert len(other.state) == len(optimizer.state) == 4
    assert fresh[2].weight not in other.state  # type: ignore[index]


def test_restored_values_have_their_types() -> None:
    """A state of an optimizer may have another dtype than its parameter."""
    model, fresh = network().bfloat16(), network().bfloat16()
    optimizer, other = (torch.optim.AdamW(each.parameters()) for each in (model, fresh))
    odd = {"betas": (0.8, 0.9), "odd": {1: (2.5, None), "names": ["a", True]}, "kind": torch.bfloat16}
    optimizer.param_groups[0] |= {**odd, "mean": torch.tensor(3.0)}
    optimizer.state[next(model.parameters())] = {"mean": torch.full((4, 3), 1 / 3), "count": 7}
    moved(model, optimizer, fresh, other)
    group, found = other.param_groups[0], other.state[next(fresh.parameters())]
    assert {key: group[key] for key in odd} == odd
    assert (group["mean"].item(), found["count"]) == (3.0, 7)
    assert torch.equal(found["mean"], torch.full((4, 3), 1 / 3))


def test_groups_and_parameters_that_were_added_during_training_are_added() -> None:
    model, fresh = network(), network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.7})  # type: ignore[index]
    optimizer.param_groups[0]["params"] += list(model[1].parameters())  # type: ignore[index]
    step(model, optimizer)
    other = torch.optim.SGD(fresh[0].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]
    moved(model, optimizer, fresh, other)
    assert [[len(group["params"]), group["lr"]] for group in other.param_groups] == [[4, 0.1], [2, 0.7]]
    step(model, optimizer)
    step(fresh, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_step_counts_stay_in_host_memory_and_moments_follow_their_parameters() -> None:
    model = network().to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    state = "optimizer.state.0.weight"
    table = {name: spec_of(piece_of(each)) for name, each in network().state_dict(prefix="model.").items()}
    table |= {f"{state}.step": TensorSpec("float32", ()), f"{state}.exp_avg": TensorSpec("float32", (4, 3))}
    targets = empty_like_saved(model, optimizer, table)
    assert [targets[f"{state}.{key}"].device.type for key in ("step", "exp_avg")] == ["cpu", "meta"]
    optimizer.param_groups[0]["capturable"] = True
    assert empty_like_saved(model, optimizer, table)[f"{state}.step"].device.type == "meta"


class Counting(nn.Module):
    """Module with the given extra state, and a buffer that training sets."""

    def __init__(self, extra: object):
        super().__init__()
        self.register_buffer("seen", None)
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def test_extra_state_and_a_buffer_that_is_filled_late_are_restored() -> None:
    model, fresh = Counting({"calls": (3, 4), "mean": torch.ones(3)}), Counting(None)
    model.seen = torch.tensor([3, 4])
    moved(model, sgd(model), fresh, sgd(fresh))
    assert fresh.seen.tolist() == [3, 4]
    assert list(fresh.state_dict()) == ["weight", "seen", "_extra_state"]
    assert isinstance(fresh.extra, dict)
    assert fresh.extra["calls"] == (3, 4)
    assert torch.equal(fresh.extra["mean"], torch.ones(3))


def lazy(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.late = nn.LazyLinear(2)


HARMS: dict[str, tuple[Callable[[Any, torch.optim.Optimizer], object], str]] = {
    "extra": (
        lambda model, optimizer: model.set_extra_state(io.BytesIO()),
        r"^model\._extra_state is a _io\.BytesIO, which no checkpoint can hold; keep it as a tensor",
    ),
    "group": (
        lambda model, optimizer: optimizer.param_groups[0].update(queue=deque()),
        r"^optimizer\.groups\.0\.queue is a collections\.deque, which no checkpoint can hold",
    ),
    "sparse": (
        lambda model, optimizer: optimizer.state[model.weight].update(sum=torch.ones(2).to_sparse()),
        r"^optimizer\.state\.weight\.sum is a sparse_coo tensor, which no checkpoint can hold",
    ),
    "stranger": (
        lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]}),
        r"^the optimizer has a parameter of shape \(5,\) that the model lacks; create the optimizer from",
    ),
    "lazy": (lazy, r"^model\.late\.weight has no shape yet; pass one batch through the lazy module before run\.model"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_state_that_no_checkpoint_can_hold_is_refused_in_one_sentence(harm: str) -> None:
    model, (change, sentence) = Counting(1), HARMS[harm]
    optimizer = sgd(model)
    change(model, optimizer)
    with pytest.raises(UsageError, match=sentence):
        check_state(model, optimizer)


def test_the_state_of_another_model_or_optimizer_is_refused() -> None:
    model = network()
    state = stored(model_and_optimizer_state(model, sgd(model)))
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    with pytest.raises(
        CheckpointError, match=r"has 'model\.0\.weight' with shape \(4, 3\), but the model has it with shape"
    ):
        restored(other, sgd(other), state)
    more = [{"params": [each]} for each in model.parameters()]
    with pytest.raises(CheckpointError, match="the optimizer has 6 parameter groups and the saved one has 1"):
        restored(model, torch.optim.SGD(more, lr=0.1), state)
    with pytest.raises(CheckpointError, match=r"lacks 'model\.1\.running_mean', which the model has"):
        restored(model, sgd(model), {name: each for name, each in state.items() if "running" not in name})
