"""Tests of the live state: it is that of the model and the optimizer now, whatever a script has done to them meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from undula.recovery.live_state import LiveState
from undula.state.model_state import model_and_optimizer_state
from undula.state.pieces import piece_of, rank_state


def assigned(model: nn.Module) -> None:
    """Move weights as MoCo's momentum encoder and WGAN's clipping do."""
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5 + 1


def through_a_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 3, model.parameters())


def through_another_dtype(model: nn.Module) -> None:
    model.double().float()
    model.weight.data.add_(5)  # type: ignore[union-attr,operator]


def _copies(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize(
    "change",
    [assigned, through_a_vector, through_another_dtype],
    ids=lambda change: str(change.__name__),
)
def test_the_state_has_the_weights_that_the_model_has_now(change: Callable[[nn.Module], None]) -> None:
    model = nn.Linear(3, 2)
    live = LiveState(model, torch.optim.AdamW(model.parameters()))
    live.held()
    change(model)
    live.held()
    with torch.no_grad():
        model.weight.add_(1)  # as the optimizer does in the next step
    assert torch.equal(live.held().pieces["model.weight"].tensor, model.weight)


def test_a_hook_that_copies_the_state_does_not_make_it_stale() -> None:
    model = nn.Linear(3, 2)
    model._register_state_dict_hook(lambda module, state, prefix, meta: state.update(_copies(state)))
    live = LiveState(model, torch.optim.AdamW(model.parameters()))
    live.held()
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(live.held().pieces["model.weight"].tensor, model.weight)


class Counted(nn.Module):
    """Layer that counts its forward passes in a buffer, and in a tensor of its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(3, 1), torch.zeros(1)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.count += 1
        return self.layer(x)  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"passes": self.passes}


def test_what_a_forward_pass_or_a_new_rate_changes_is_copied_and_nothing_else() -> None:
    model, rate = Counted(), torch.tensor(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    live = LiveState(model, optimizer)
    held = live.held()
    copies = live.copies(held)
    before = {name: copy.clone() for name, copy in copies.items()}
    model(torch.ones(1, 3))
    rate.fill_(0.2)
    assert {name for name, copy in copies.items() if not torch.equal(copy, held.pieces[name].tensor)} == copies.keys()
    assert all(torch.equal(copy, before[name]) for name, copy in copies.items())
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert sum(held.pieces[name].tensor.numel() for name in held.pieces.keys() - copies.keys()) == 3 * weights + 2


def test_the_state_has_the_entries_that_the_optimizer_has_now() -> None:
    model = nn.Linear(1000, 1, bias=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    live = LiveState(model, optimizer)
    for number in range(20):
        for _ in range(2):  # the second tensor reuses the address of the one before the first
            optimizer.state[model.weight]["momentum_buffer"] = torch.full((1, 1000), float(number))
        held = live.held()
        assert held.pieces["optimizer.state.weight.momentum_buffer"].tensor[0, 0] == number


@pytest.mark.parametrize(("saved", "wanted"), [({}, 0.0), ({"measured": torch.ones(2)}, 1.0)])
def test_a_piece_that_a_changed_setting_adds_or_removes_starts_anew(saved: dict[str, Tensor], wanted: float) -> None:
    model = nn.Linear(2, 1)
    optimizer, own = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(2)
    live = LiveState(model, optimizer, lambda: {"measured": piece_of(own)})
    state = rank_state({**model_and_optimizer_state(model, optimizer), **saved, "gone": torch.ones(3)})
    targets = live.targets(state.expected, state.values)
    targets.copy_whole(state)
    targets.load(state.values)
    assert own.tolist() == [wanted] * 2
