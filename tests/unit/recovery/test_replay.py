"""Tests that a recorded update, taken again on plain tensors, has the bits of the step that the optimizer took on shards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from undula.optim.lamb import Lamb
from undula.optim.lars import LARS
from undula.parallel.sharding import set_up_optimizer
from undula.recovery.baseline import Work
from undula.recovery.live_state import LiveState
from undula.recovery.update_log import UpdateLog, can_record, replayed, replayed_holding
from undula.state.pieces import Piece, RankState

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, maximize=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1, t0=2),
    "LARS": lambda params: LARS(params, lr=0.1, weight_decay=0.1),
    "LAMB": lambda params: Lamb(params, lr=0.1, weight_decay=0.1),
}


class Net(nn.Module):
    """Network with a tied weight, a layer that some steps do not use, one that is used late, and a frozen one. One tensor has fewer rows
    than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tied = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.tied.weight = self.second.weight
        self.frozen, self.last, self.late = nn.Linear(7, 7), nn.Linear(7, 1), nn.Linear(7, 7)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, uses_all: bool, uses_late: bool) -> torch.Tensor:
        x = self.second(self.first(x).tanh())
        x = self.late(x) if uses_late else x
        return self.last(self.tied(self.frozen(x)) if uses_all else x)  # type: ignore[no-any-return]


def copied(state: RankState) -> RankState:
    pieces = {
        name: Piece(piece.tensor.clone(), piece.shape, piece.offsets, piece.is_replicated)
        for name, piece in state.pieces.items()
    }
    return RankState(pieces, state.values)


def _differences(rank: int, world_size: int) -> list[str]:
    found = []
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(1)
        model = fully_shard(Net())
        bias = [parameter for parameter in model.parameters() if parameter.dim() == 1 and parameter.requires_grad]
        others = [parameter for parameter in model.parameters() if parameter.dim() > 1 and parameter.requires_grad]
        optimizer = make([{"params": others}, {"params": bias, "lr": 0.01}])
        set_up_optimizer(optimizer, list(model.parameters()), CPU, is_chosen=True)
        live, log = LiveState(model, optimizer), UpdateLog(model, optimizer, "plan", 1)
        assert can_record(model, optimizer)
        states = [copied(live.held())]
        updates = []
        for step in range(5):
            model(torch.arange(20.0).view(4, 5) + rank + step, step % 2 == 0, step > 2).sum().backward()
            if isinstance(optimizer, Lamb | LARS):
                optimizer.settle()
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step  # as a script may do
            log.record(step, step + 1, step != 2, Work())
            assert log.pending is not None
            updates.append(copied(log.pending.state))
            if step != 2:
                optimizer.step()
            optimizer.zero_grad()
            states.append(copied(live.held()))
        state = states[1]  # which has the state of the optimizer
        for step in range(1, 5):
            before = copied(state)
            state = replayed(state, updates[step], type(optimizer), CPU)
            for key, piece in before.pieces.items():
                assert key not in state.pieces or piece.box == state.pieces[key].box
            holding = replayed_holding(states[1].holding, updates[step].values)
            assert holding is not None
            for key in holding.boxes:
                piece = state.pieces[key]
                expected = states[step + 1].pieces[key].tensor
                if "tied.weight" not in key and not torch.equal(piece.tensor, expected):
                    found.append(f"{name} step {step}: {key}")
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_updates_that_are_taken_again_have_the_same_bits(world_size: int) -> None:
    assert on_ranks(world_size, _differences) == [[]] * world_size


def test_the_updates_of_an_optimizer_with_hooks_or_of_unknown_results_are_not_recorded() -> None:
    on_ranks(1, _refused)


def _refused(rank: int, world_size: int) -> None:
    model = fully_shard(Net())
    params = list(model.parameters())
    assert not can_record(model, torch.optim.AdamW(params, fused=True))
    assert not can_record(Net(), torch.optim.AdamW(params))
    hooked = torch.optim.AdamW(params)
    hooked.register_step_post_hook(lambda *_: None)
    assert not can_record(model, hooked)
    stepped: Any = torch.optim.AdamW(params)
    stepped.step = lambda: None
    assert not can_record(model, stepped)
    scheduled = torch.optim.AdamW(params)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert can_record(model, scheduled)
