"""Tests of the detection of live state."""

import pytest
import torch
from torch import Tensor, nn

from undula.recovery.live_state import LiveState
from undula.state.model_state import model_and_optimizer_state
from undula.state.pieces import piece_of, rank_state


def test_new_state_of_an_optimizer_is_detected_even_at_a_reused_address() -> None:
    model = nn.Linear(1000, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    live = LiveState(model, optimizer)
    for number in range(20):
        for _ in range(2):  # the second tensor reuses the address of the one before the first
            optimizer.state[model.weight]["momentum_buffer"] = torch.full((1, 1000), float(number))
        held = live.held()
        assert held.pieces["optimizer.state.weight.momentum_buffer"].tensor[0, 0] == number
    assert live.held() is held


@pytest.mark.parametrize(("saved", "wanted"), [({}, 0.0), ({"measured": torch.ones(2)}, 1.0)])
def test_a_piece_that_a_changed_setting_adds_or_removes_starts_anew(saved: dict[str, Tensor], wanted: float) -> None:
    model = nn.Linear(2, 1)
    optimizer, own = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(2)
    live = LiveState(model, optimizer, lambda: {"measured": piece_of(own)})
    state = rank_state({**model_and_optimizer_state(model, optimizer), **saved, "gone": torch.ones(3)})
    targets = live.targets(state.expected)
    targets.copy_whole(state)
    targets.load(state.values)
    assert own.tolist() == [wanted] * 2
