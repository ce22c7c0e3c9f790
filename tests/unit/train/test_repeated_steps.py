"""Tests that a step which a run repeats is compared with what it was before."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_job import CPU, cpu_run, numbers_job
from torch import Tensor, nn

from undula.state.events import WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train.job import Job
from undula.train.single_process import local_world

CODE = "repeated_steps_differ"


class Counting(nn.Module):
    """Layer whose result depends on how often it was called, which is no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(1, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + 0.01 * self.calls)  # type: ignore[no-any-return]


class CountingSGD(torch.optim.SGD):
    """Optimizer that counts its steps in an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)


def draws() -> Callable[[], float]:
    generator = random.Random(3)
    return generator.random


def train(
    job: Job,
    ends_after: int | None,
    make: Callable[[], nn.Module] = lambda: nn.Linear(1, 1),
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    factors: Callable[[], Callable[[], float]] = lambda: lambda: 1.0,
) -> list[WarningEvent]:
    """Train until the script fails after some steps, or to the end, and return the warnings of the ledger."""
    with local_world(CPU):
        run, factor = cpu_run(job), factors()
        torch.manual_seed(3)
        model = run.model(make())
        run.optimizer(optimizer(model.parameters(), lr=run.base_lr))
        try:
            for step in run.steps():
                for batch in step.batches():
                    step.backward((model(batch["x"][:, None] / 48) - factor()).square().mean())
                step.update()
                if step.index + 1 == ends_after:
                    raise ArithmeticError("the script fails")
        except ArithmeticError:
            pass
        run.free()
    return [event for event in events_of(read_ledger(Store(job.run_url)).events, WarningEvent) if event.code == CODE]


KEPT: dict[str, dict[str, Any]] = {
    "attributes of the model": {"make": Counting},
    "attributes of the optimizer": {"optimizer": CountingSGD},
    "random numbers of the script": {"factors": draws},
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_script_keeps_itself_is_noticed_when_steps_are_repeated(name: str, tmp_path: Path) -> None:
    job = replace(numbers_job(tmp_path, epochs=2), checkpoint=CheckpointSpec(every_steps=3, snapshot_every_steps=0))
    assert train(job, 5, **KEPT[name]) == []
    (warning,) = train(job, None, **KEPT[name])
    assert warning.detail.startswith(("step 3 had the loss", "step 4 had the loss"))


def test_nothing_is_said_if_repeated_steps_have_their_losses(tmp_path: Path) -> None:
    job = replace(numbers_job(tmp_path, epochs=2), checkpoint=CheckpointSpec(every_steps=3, snapshot_every_steps=0))
    train(job, 5)
    assert train(job, None) == []
    ledger = read_ledger(Store(job.run_url))
    assert ledger.replaced["step"].to_pylist() == [3, 4]


def test_a_run_with_other_settings_is_not_compared(tmp_path: Path) -> None:
    job = replace(numbers_job(tmp_path, epochs=2), checkpoint=CheckpointSpec(every_steps=3, snapshot_every_steps=0))
    train(job, 5)
    assert train(job, None, optimizer=partial(torch.optim.SGD, weight_decay=0.1)) == []
