"""Tests of what a loop with more of its own needs: shares of the loss, the reduced gradient, schedulers, and state of the script."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_scripts import on_tokens, tokens_of
from numbers_job import begin, cpu_run, network, numbers_job, refusal, run_batches
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from undula.data.spec import ValidationSpec
from undula.plan.schedule import ScheduleSpec
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state.events import EndEvent, ValidationEvent
from undula.state.ledger import events_of, last_event, read_ledger
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import local_world
from undula.train.step import Step


def columns_of(job: Job, *names: str) -> list[list[Any]]:
    steps = read_ledger(Store(job.run_url)).steps
    return [steps[name].to_pylist() for name in names]


def by_hand(steps: int) -> list[float]:
    """Return the losses of `train_on_tokens` for steps of all samples, without this package."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    x = torch.arange(48.0)
    for _ in range(steps):
        weights = tokens_of(x)
        squares = (model(x[:, None] / 48)[:, 0] - x / 48).square()
        loss = (squares * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def with_scheduler(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[[Run], None]:
    def train(run: Run) -> None:
        model = run.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=run.base_lr, momentum=0.9)
        run.optimizer(optimizer, make(optimizer))
        for step in run.steps():
            run_batches(step, model)
            step.update()

    return train


def constant(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.usefixtures("process_group")
def test_a_mean_over_tokens_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    job = numbers_job(tmp_path, global_batch=48, epochs=3)
    run = cpu_run(job)
    on_tokens(run)
    run.free()
    losses, rates = columns_of(job, "loss", "lr")
    assert losses == pytest.approx(by_hand(steps=3), abs=1e-6)
    assert rates == pytest.approx([0.1, 0.05, 0.1 / 3])


class Interrupted:
    """Script that works after each step, in groups of one process that end at some moments."""

    def __init__(self, job: Job):
        self.job = job
        self.worker = WorkerState(is_run=True, controller=object())
        self.done: list[int] = []
        """Steps after which the script has worked, including repetitions."""

    def train(self, fails_after: int | None = None, leaves_after: int | None = None) -> None:
        """Train until the work after a step fails, or until the group ends at the boundary after a step.

        The state counts the steps whose work was done.
        """
        with local_world(torch.device("cpu")):
            self.worker.join_group()
            run = cpu_run(self.job, worker=self.worker)
            try:
                self._loop(run, fails_after, leaves_after)
            except (OSError, LeaveGroup):
                run.hand_over()
            finally:
                run.free()

    def _loop(self, run: Run, fails_after: int | None, leaves_after: int | None) -> None:
        count, unfinished = 0, False

        def restore(value: int, is_unfinished: bool) -> None:
            nonlocal count, unfinished
            count, unfinished = value, is_unfinished

        def work() -> None:
            nonlocal count
            if count == fails_after:
                raise OSError
            self.done.append(count)
            count += 1

        model = begin(run, network())
        run.state("count", lambda: count, restore)
        for step in run.steps():
            if unfinished:
                work()
                unfinished = False
            assert count == step.index
            self.worker.request = Request(leaves=step.index == leaves_after)
            run_batches(step, model)
            step.update()
            work()


def test_work_after_a_step_is_repeated_only_if_it_was_not_finished(tmp_path: Path) -> None:
    script = Interrupted(replace(numbers_job(tmp_path, epochs=2), checkpoint=CheckpointSpec(every_steps=1000)))
    script.train(fails_after=2)  # step 2 is committed, and the work after it is not done
    assert script.done == [0, 1]
    script.train(leaves_after=4)
    assert script.done == [0, 1, 2, 3, 4]
    script.train()
    assert script.done == list(range(8))


def test_a_script_can_validate_by_itself_and_end_the_run(tmp_path: Path) -> None:
    job = replace(numbers_job(tmp_path), validation=ValidationSpec(every_steps=1))
    with local_world(torch.device("cpu")):
        run = cpu_run(job)
        model = begin(run, network())
        for step in run.steps():
            run_batches(step, model)
            step.update()
            run.alive()
            run.validated({"loss": 2.0 - step.index, "accuracy": 0.5}, samples=7)
            if step.index == 1:
                run.stop("the script has seen enough")
        run.free()
    ledger = read_ledger(Store(job.run_url))
    events = events_of(ledger.events, ValidationEvent)
    assert [(event.step, event.loss, event.samples) for event in events] == [(1, 2.0, 7), (2, 1.0, 7)]
    assert events[0].means == {"loss": 2.0, "accuracy": 0.5}
    end = last_event(ledger.events, EndEvent)
    assert end is not None
    assert (end.step, end.reason) == (2, "the script has seen enough")


def test_what_a_script_does_to_a_tensor_later_changes_no_record_of_it(tmp_path: Path) -> None:
    job = replace(numbers_job(tmp_path), validation=ValidationSpec(every_steps=1))
    with local_world(torch.device("cpu")):
        run = cpu_run(job)
        model = run.model(network().double())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
        for step in run.steps():
            for batch in step.batches():
                loss = model(batch["x"][:, None].double() / 48).square().mean()
                step.backward(loss)
                other = torch.ones(())
                step.log(other=other)
                for tensor in (loss.detach(), other):
                    tensor.zero_()
            norm = step.reduce()
            norm.zero_()
            step.update()
            mean: Any = torch.ones(())
            run.validated({"loss": mean}, samples=1)
            mean.zero_()
        run.free()
    losses, norms, logged = columns_of(job, "loss", "grad_norm", "logged")
    assert min(losses) > 0
    assert min(norms) > 0
    assert logged == ['{"other": 1.0}'] * 4
    events = events_of(read_ledger(Store(job.run_url)).events, ValidationEvent)
    assert [event.loss for event in events] == [1.0] * 4


def in_first_step(act: Callable[[Step, Any], object]) -> Callable[[Run], None]:
    def train(run: Run) -> None:
        model = begin(run, network())
        for step in run.steps():
            act(step, model)

    return train


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    job = numbers_job(tmp_path)

    def loads_late(step: Step, model: Any) -> None:
        for _ in step.batches():
            step.load()

    def reduces_early(step: Step, model: Any) -> None:
        step.reduce()

    def reduces_twice(step: Step, model: Any) -> None:
        run_batches(step, model)
        step.reduce()
        step.reduce()

    assert refusal(job, in_first_step(loads_late)).startswith("step.load() was called after step.batches() or twice")
    assert refusal(job, in_first_step(reduces_early)).startswith("step.reduce() was called before the loop over")
    assert refusal(job, in_first_step(reduces_twice)).startswith("step.reduce() was called twice or after")
    assert refusal(job, lambda run: run.validated({"loss": 1.0}, 1)).startswith("run.validated() was called before")

    def holds_a_tensor(run: Run) -> None:
        run.state("mean", lambda: torch.zeros(1), lambda value, is_unfinished: None)
        in_first_step(lambda step, model: [*map(step.backward, _losses(step, model)), step.update()])(run)

    assert "run.state('mean') is a tensor; keep it as a number" in refusal(job, holds_a_tensor)
    measured = replace(job, gradient=replace(job.gradient, noise_every_steps=1))
    shared = in_first_step(lambda step, model: [step.backward(each, share=1.0) for each in _losses(step, model)])
    assert refusal(measured, shared).startswith("step.backward() got a share, but the job measures")


def _losses(step: Step, model: Any) -> Any:
    return (model(batch["x"][:, None]).square().mean() for batch in step.batches())


@pytest.mark.parametrize(
    ("plan", "schedule", "make", "sentence"),
    [
        ({}, {}, ReduceLROnPlateau, "run.optimizer() got a ReduceLROnPlateau, which needs a metric"),
        ({"batch": "elastic"}, {}, constant, "run.optimizer() got a scheduler, but plan.batch=elastic"),
        ({}, {"base_batch": 3}, constant, "run.optimizer() got a scheduler, but schedule.base_batch"),
        ({}, {"warmup_epochs": 1}, constant, "run.optimizer() got a scheduler, which replaces the job's"),
    ],
)
def test_a_scheduler_that_a_run_cannot_use_is_refused(
    tmp_path: Path, plan: dict[str, Any], schedule: dict[str, Any], make: Callable[[Any], Any], sentence: str
) -> None:
    job = replace(numbers_job(tmp_path, **plan), schedule=ScheduleSpec(base_lr=0.1, **schedule))
    assert refusal(job, with_scheduler(make)).startswith(sentence)
