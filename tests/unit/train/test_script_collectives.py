"""Tests of collectives that a script begins in a batch: they are refused at any number of workers, before any rank waits for another."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from night import at_night
from numbers_job import begin, cpu_run, network, numbers_job, run_batches
from ranks import on_ranks
from torch import Tensor, nn

from undula.data.spec import ValidationSpec
from undula.errors import UsageError
from undula.parallel.spec import ShardingSpec
from undula.train.job import Job

HABITS = {
    "all-reduce in the forward pass": lambda x, group: _summed(x, dist.group.WORLD),
    "all-reduce in another group": lambda x, group: _summed(x, group),
    "functional collective": lambda x, group: functional.all_reduce(x, "sum", group).clone(),
    "gathered objects": lambda x, group: _gathered(x),
    "barrier": lambda x, group: _after_barrier(x),
    "gradient": lambda x, group: _SummedGradient.apply(x),
}


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    mean = x.detach().mean()
    dist.all_reduce(mean, group=group)
    return x - mean


def _gathered(x: Tensor) -> Tensor:
    found = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, float(x.mean()))
    return x - sum(found)


def _after_barrier(x: Tensor) -> Tensor:
    dist.barrier()
    return x


class _SummedGradient(torch.autograd.Function):
    """Sums gradients over the ranks, as torch.distributed.nn.functional.all_reduce does."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        found = gradient.clone()
        dist.all_reduce(found)
        return found


class Meeting(nn.Module):
    """Network whose forward pass meets those of other ranks from the n-th step on."""

    def __init__(self, meet: Callable[[Tensor, dist.ProcessGroup], Tensor], group: dist.ProcessGroup, first: int):
        super().__init__()
        self.net, self.meet, self.group = network(), meet, group
        self.first, self.step = first, 0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return self.meet(found, self.group) if self.step >= self.first else found


def _meets(rank: int, world_size: int, job: Job, habit: str, first: int) -> tuple[int, str]:
    """Return the step that is refused, and the message."""
    run = cpu_run(job, rank, world_size)
    model = run.model(Meeting(HABITS[habit], dist.new_group(), first))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    index = -1
    try:
        for step in run.steps():
            index = model.step = step.index  # type: ignore[assignment]
            run_batches(step, model)
            step.update()
    except UsageError as error:
        return index, str(error)
    finally:
        run.free()
    return -1, ""


def _meet(rank: int, world_size: int, job: Job, first: int) -> dict[str, tuple[int, str]]:
    """Return the same for each habit."""
    return {
        habit: _meets(rank, world_size, replace(job, run_url=f"{job.run_url}-{number}"), habit, first)
        for number, habit in enumerate(HABITS)
    }


@pytest.mark.parametrize(
    ("world_size", "first", "stage"),
    [*at_night([(1, 0, 0), (3, 0, 0), (1, 1, 3), (3, 0, 2)]), (3, 1, 0), (2, 1, 1), (3, 1, 3)],
)
def test_a_collective_in_a_batch_is_refused_on_every_rank_before_any_of_them_waits(
    tmp_path: Path, world_size: int, first: int, stage: Any
) -> None:
    """Three ranks have two, one and one of the four virtual workers; from the second step on, gradients are sent in backward passes."""
    job = replace(numbers_job(tmp_path), sharding=ShardingSpec(stage))
    for rank in on_ranks(world_size, _meet, job, first, limit_s=60):
        for habit, (step, message) in rank.items():
            assert step == first, habit
            assert message.startswith(
                f"the script has begun a collective of torch.distributed in a batch of step {first}, such as"
            ), habit
            assert "step.total() outside of the loop" in message


def _meets_outside(rank: int, world_size: int, job: Job) -> list[float]:
    run = cpu_run(job, rank, world_size)
    model = begin(run, network())
    sums = []
    for step in run.steps():
        ranks = torch.ones(())
        dist.all_reduce(ranks)
        for batch in step.batches():
            step.backward(model(batch["x"][:, None] / 48).square().mean())
            if step.is_last:
                dist.all_reduce(ranks)
        assert step.total(1.0) == world_size
        step.update()
        dist.barrier()
        sums.append(float(ranks))
    run.free()
    return sums


def test_collectives_around_the_batches_of_a_step_are_the_scripts_own(tmp_path: Path) -> None:
    assert on_ranks(3, _meets_outside, numbers_job(tmp_path)) == [[9.0] * 4] * 3


def _logs(rank: int, world_size: int, job: Job) -> str:
    """Return the message for a script that sums each batch's loss over the ranks."""
    run = cpu_run(job, rank, world_size)
    model = begin(run, network())

    def train() -> None:
        for step in run.steps():
            for batch in step.batches():
                loss = model(batch["x"][:, None] / 48).square().mean()
                step.backward(loss)
                dist.all_reduce(loss.detach())
            step.update()

    with pytest.raises(UsageError) as caught:
        train()
    run.free()
    return str(caught.value)


def test_a_loss_that_is_summed_over_ranks_after_each_batch_is_refused(tmp_path: Path) -> None:
    """All ranks have two batches in each step. The first of them shows it."""
    for message in on_ranks(2, _logs, numbers_job(tmp_path)):
        assert message.startswith("the script has begun a collective")


def _validates(rank: int, world_size: int, job: Job) -> str:
    """Return the message for a validation function that averages over the ranks."""
    run = cpu_run(job, rank, world_size)
    model = begin(run, network())

    def validate(batch: dict[str, Tensor]) -> Tensor:
        loss = model(batch["x"][:, None] / 48).square().mean()
        dist.all_reduce(loss)
        return loss / world_size

    def train() -> None:
        for step in run.steps(validate):
            run_batches(step, model)
            step.update()

    with pytest.raises(UsageError) as caught:
        train()
    run.free()
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "stage"), [*at_night([(1, 0), (2, 1)]), (3, 0), (3, 3)])
def test_a_validation_that_averages_over_ranks_is_refused(tmp_path: Path, world_size: int, stage: Any) -> None:
    """Of three ranks, two have one batch of each round, and one has two. The library averages over the samples of all."""
    job = replace(numbers_job(tmp_path), sharding=ShardingSpec(stage))
    job = replace(job, data=replace(job.data, validation=job.data.train), validation=ValidationSpec(every_steps=1))
    for message in on_ranks(world_size, _validates, job, limit_s=60):
        assert message.startswith("the script has begun a collective of torch.distributed in a batch of a validation")
        assert message.endswith("return the mean over the batch, and the run averages over the samples of all workers")
