"""Tests that a run resumes with any state of its model and optimizer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from numbers_job import cpu_run, numbers_job
from torch import Tensor, nn

from undula.train.job import Job
from undula.train.step import Step

pytestmark = pytest.mark.usefixtures("process_group")


class HalfUsed(nn.Module):
    """A model with a layer that never receives a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(1, 1)
        self.unused = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def trained(job: Job, stop: int | None = None) -> list[Tensor]:
    """Return the weights of a run at its end or before step `stop`."""
    run = cpu_run(job)
    model = run.model(HalfUsed())
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
    steps: Iterator[Step] = run.steps()
    for step in steps:
        if step.index == stop:
            break
        for batch in step.batches():
            step.backward(model(batch["x"][:, None] / 48).square().mean())
        step.update()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_run_with_a_layer_that_never_receives_a_gradient_resumes(tmp_path: Path) -> None:
    whole = trained(numbers_job(tmp_path / "whole"))
    job = numbers_job(tmp_path / "resumed")
    trained(job, stop=3)
    assert all(torch.equal(a, b) for a, b in zip(trained(job), whole, strict=True))


def grown(job: Job, stop: int | None = None) -> list[Tensor]:
    """Return the weights of a run whose script unfreezes a layer before step 2 and adds it to the optimizer as a group."""
    run = cpu_run(job)
    model = run.model(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).requires_grad_(False))
    optimizer = run.optimizer(torch.optim.AdamW(model[1].requires_grad_(True).parameters(), lr=run.base_lr))  # type: ignore[index]
    steps: Iterator[Step] = run.steps()
    for step in steps:
        if step.index == stop:
            break
        if step.index >= 2:
            model[0].requires_grad_(True)  # type: ignore[index]
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.5 * run.base_lr})  # type: ignore[index]
        for batch in step.batches():
            step.backward(model(batch["x"][:, None] / 48).square().mean())
        step.update()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_group_added_during_training_follows_the_schedule_after_a_resume(tmp_path: Path) -> None:
    whole = grown(numbers_job(tmp_path / "whole"))
    job = numbers_job(tmp_path / "resumed")
    grown(job, stop=3)
    assert all(torch.equal(a, b) for a, b in zip(grown(job), whole, strict=True))
    assert not torch.equal(whole[0], grown(numbers_job(tmp_path / "begun"), stop=1)[0])
