"""A run resumes whatever its model and its optimizer keep as state."""

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
    """The weights of a run after its last step, or after it was left before step `stop`."""
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
