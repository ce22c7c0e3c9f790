"""Scripts with habits of plain torch loops: each trains as a run, which is interrupted or not, and as the plain loop that it comes from.

The rows of the table in docs/migrate.md are the names of the habits in habits_right.py and habits_refused.py.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numbers_job import cpu_run, lost_variables, network, numbers_job
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LRScheduler

from undula.errors import UsageError
from undula.plan.schedule import ScheduleSpec
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state.spec import CheckpointSpec
from undula.train.job import Job
from undula.train.run import Run
from undula.train.step import Step

STEPS = 5
"""Number of steps, each of which has all 48 samples."""


class Habit:
    """Script that trains a small network, in a run or in a plain loop. Habits override what they do in another way.

    Attributes:
        tolerance: Largest difference of a number between a run and the plain loop.
        model: Model of the script.
        optimizer: Optimizer of the script.
        number: Number of the current step.
        step: Step of the run; None in the plain loop.
    """

    tolerance = 1e-6
    model: Any
    optimizer: torch.optim.Optimizer
    number = 0
    step: Step | None = None

    def make(self) -> nn.Module:
        return network()

    def optimize(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        return None

    def begin(self) -> None:
        """Work before the loop over the steps."""

    def before_step(self) -> None:
        """Work before the batches of a step."""

    def loss(self, x: Tensor) -> Tensor:
        return (self.model(x) - torch.sin(6 * x)).square().mean()

    def before_backward(self, loss: Tensor) -> None:
        """Work in a batch before its backward pass."""

    def after_backward(self, loss: Tensor) -> None:
        """Work in a batch after its backward pass."""

    def before_update(self) -> None:
        """Work after the last batch, before the gradient is reduced."""

    def reduced(self) -> None:
        """Work on the gradient of the step, before the optimizer takes it."""

    def after_update(self) -> None:
        """Work after the optimizer's step."""

    def batches(self, step: Step) -> Iterator[Any]:
        return step.batches()


def train(run: Run, habit: Habit, leaves: Callable[[int], None] = lambda number: None) -> None:
    """Train as a run. `leaves` is called with the number of each step."""
    habit.model = run.model(habit.make())
    habit.optimizer = habit.optimize(habit.model)
    run.optimizer(habit.optimizer, habit.schedule(habit.optimizer))
    habit.begin()
    for habit.step in run.steps():
        habit.number = habit.step.index
        leaves(habit.number)
        habit.before_step()
        for batch in habit.batches(habit.step):
            loss = habit.loss(batch["x"][:, None] / 48)
            habit.before_backward(loss)
            habit.step.backward(loss)
            habit.after_backward(loss)
        habit.before_update()
        if type(habit).reduced is not Habit.reduced:
            habit.step.reduce()
            habit.reduced()
        habit.step.update()
        habit.after_update()


def weights_of(model: nn.Module) -> dict[str, list[float]]:
    whole = {
        name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()
    }
    return {name: value.double().flatten().tolist() for name, value in whole.items()}


def plain(habit: Habit) -> dict[str, list[float]]:
    """Train in a plain loop, and return the weights."""
    habit.model = habit.make()
    habit.optimizer = habit.optimize(habit.model)
    scheduler = habit.schedule(habit.optimizer)
    habit.begin()
    for habit.number in range(STEPS):
        habit.before_step()
        loss = habit.loss(torch.arange(48.0)[:, None] / 48)
        habit.before_backward(loss)
        loss.backward()
        habit.after_backward(loss)
        habit.before_update()
        habit.reduced()
        habit.optimizer.step()
        if scheduler:
            scheduler.step()
        habit.optimizer.zero_grad()
        habit.after_update()
    return weights_of(habit.model)


def in_groups(
    rank: int, world_size: int, job: Job, make: type[Habit], leaves_after: int | None
) -> dict[str, list[float]]:
    """Train as a run whose group ends after a step, if it does, and return the weights."""
    has_scheduler = make.schedule is not Habit.schedule  # it replaces the schedule, of which nothing may be set then
    job = replace(job, schedule=ScheduleSpec(base_lr=0.1, decay="cosine" if has_scheduler else "constant"))
    worker = WorkerState(is_run=True, controller=object())

    def leaves(number: int) -> None:
        worker.request = Request(leaves=number == leaves_after)

    found: dict[str, list[float]] = {}
    while not found:
        worker.join_group()
        habit, run = make(), cpu_run(job, rank, world_size, worker)
        try:
            train(run, habit, leaves)
            found = weights_of(habit.model)
        except LeaveGroup:
            run.hand_over()
        finally:
            run.free()
    assert lost_variables(job.run_url) == []
    return found


def outcomes(
    rank: int,
    world_size: int,
    folder: Path,
    habits: dict[str, type[Habit]],
    is_sharded: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Return by name the weights with which each habit ends, or the sentence of the error.

    The runs are resumed. On one rank, there is also a run that is not.

    Args:
        rank: Number of this rank.
        world_size: Number of ranks.
        folder: Folder of the runs.
        habits: Habits by name.
        is_sharded: Whether the models are sharded.
        settings: Other settings of the job.
    """
    data = numbers_job(folder / f"rank {rank}", global_batch=48, epochs=STEPS, shuffle="none")
    job = replace(data, checkpoint=CheckpointSpec(every_steps=1000, snapshot_every_steps=0), **settings)
    found: dict[str, Any] = {}
    for number, (name, habit) in enumerate(habits.items()):
        make = sharded(habit) if is_sharded else habit
        try:
            found[name] = [
                in_groups(rank, world_size, replace(job, run_url=f"{folder}/{number} {end}"), make, end)
                for end in ([None, 1] if world_size == 1 else [1])
            ]
        except UsageError as error:
            found[name] = str(error)
        except Exception:
            found[name] = traceback.format_exc()
        dist.barrier()
    return found


def sharded(make: type[Habit]) -> type[Habit]:
    """Return a habit whose model is sharded."""

    def make_sharded(self: Habit) -> nn.Module:
        return fully_shard(make.make(self))

    return type(make.__name__, (make,), {"make": make_sharded})
