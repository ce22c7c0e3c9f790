"""What a script changes between steps on one rank alone makes the weights of the ranks come apart, and is refused on all of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_job import cpu_run, network, numbers_job, run_batches
from ranks import on_ranks
from torch import nn

from undula.errors import UsageError
from undula.parallel.spec import ShardingSpec
from undula.train.job import Job


def half(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def half_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(model.parameters()).data.mul_(0.5)


def half_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[next(model.parameters())]["exp_avg"].mul_(0.5)


def decay(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.5


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.eval()


CHANGES: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], None], int, str]] = {
    "weights": (half, 0, "the weights, their gradients or the optimizer's state"),
    "state": (half_state, 0, "the weights, their gradients or the optimizer's state"),
    "weights, sharded": (half, 3, "the weights, their gradients or the optimizer's state"),
    "state, sharded": (half_state, 2, "the weights, their gradients or the optimizer's state"),
    "data, sharded": (half_data, 1, "the weights, their gradients or the optimizer's state"),
    "mode": (
        evaluate,
        0,
        "the optimizer's settings, what is frozen, or which modules are in evaluation mode (eval() and train())",
    ),
    "settings": (
        decay,
        0,
        "the optimizer's settings, what is frozen, or which modules are in evaluation mode (eval() and train())",
    ),
    "settings, sharded": (
        decay,
        3,
        "the optimizer's settings, what is frozen, or which modules are in evaluation mode (eval() and train())",
    ),
}


def trained(rank: int, world_size: int, job: Job, name: str, ranks: tuple[int, ...]) -> str:
    """Train, with a change after the second step on some ranks, and return the error."""
    run: Any = cpu_run(job, rank, world_size)
    model = run.model(network())
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    try:
        for step in run.steps():
            run_batches(step, model)
            step.update()
            if step.index == 1 and rank in ranks:
                CHANGES[name][0](model, optimizer)
    except UsageError as error:
        return str(error)
    finally:
        run.free()
    return ""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_on_one_rank_is_refused_and_the_same_change_on_all_is_right(tmp_path: Path, name: str) -> None:
    _, stage, what = CHANGES[name]
    spec = ShardingSpec(stage)  # type: ignore[arg-type]
    first, second = (replace(numbers_job(tmp_path / str(number)), sharding=spec) for number in range(2))
    assert on_ranks(2, trained, first, name, (0, 1)) == ["", ""]
    for error in on_ranks(2, trained, second, name, (1,)):
        assert error.startswith(f"the script has changed {what} on some workers only before the update of step 2, ")


def clamped(rank: int, world_size: int, job: Job, ranks: tuple[int, ...]) -> str:
    """Train with gradients that some ranks clamp, and with copies of weights that change in place on the first rank."""
    run: Any = cpu_run(job, rank, world_size)
    model = run.model(network())
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    try:
        for step in run.steps():
            run_batches(step, model)
            step.reduce()
            for parameter in model.parameters() if rank in ranks else ():
                parameter.grad.clamp_(-0.01, 0.01)
            step.update()
            if rank == 0:
                next(model.parameters()).detach().clone().mul_(2.0)
    except UsageError as error:
        return str(error)
    finally:
        run.free()
    return ""


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_one_rank_changes_are_refused_and_copies_may_change(tmp_path: Path, stage: int) -> None:
    spec = ShardingSpec(stage)  # type: ignore[arg-type]
    first, second = (replace(numbers_job(tmp_path / str(number)), sharding=spec) for number in range(2))
    assert on_ranks(2, clamped, first, (0, 1)) == ["", ""]
    for error in on_ranks(2, clamped, second, (0,)):
        assert error.startswith(
            "the script has changed the weights, their gradients or the optimizer's state on some workers only"
        )
