"""Tests of the detection of live state."""

import torch
from torch import nn

from undula.recovery.live_state import LiveState


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
