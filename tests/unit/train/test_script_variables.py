"""Tests of variables of the script that begin anew in a new worker group: an event names one that is read later, and no other."""

import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from features import numbers_of
from group_kit import SCRIPTS, Fault, Workers
from numbers_job import CPU, begin, cpu_run, lost_variables, network, numbers_job
from torch import Tensor, nn
from tqdm import tqdm

from undula.data.spec import ValidationSpec
from undula.parallel.spec import ShardingSpec
from undula.recovery.worker_state import GroupEndedError, LeaveGroup, Request, WorkerState
from undula.state.events import ValidationEvent
from undula.state.ledger import events_of, read_ledger
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import local_world
from undula.train.step import Step

Ends = Callable[[int], None]
"""Function that a script calls in the batches of a step with its index, where the group may end."""


def batches(step: Step, model: nn.Module, ends: Ends, factor: float = 1.0) -> float:
    """Run the batches of a step, update the model, and return the loss."""
    for batch in step.batches():
        step.backward((factor * model(batch["x"][:, None] / 48) - 1).square().mean())
        ends(step.index)
    step.update()
    return step.loss or 0.0


def copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def move(averages: list[Tensor], model: nn.Module) -> None:
    for average, parameter in zip(averages, model.parameters(), strict=True):
        average.lerp_(parameter.detach(), 0.3)


def with_weights(model: nn.Module, weights: list[Tensor], batch: Any) -> Tensor:
    """Return the loss of a model with other weights."""
    named = dict(zip(dict(model.named_parameters()), weights, strict=True))
    return torch.func.functional_call(model, named, batch["x"][:, None] / 48).sub(1).square().mean()


def average_in_a_list(run: Run, ends: Ends) -> None:
    model = begin(run, network())
    averages = copies(model)
    for step in run.steps(lambda batch: with_weights(model, averages, batch)):
        batches(step, model, ends)
        move(averages, model)


def average_in_a_dict(run: Run, ends: Ends) -> None:
    model = begin(run, network())
    shadow: dict[str, Tensor] = {}

    def validate(batch: Any) -> Tensor:
        return with_weights(model, [shadow.get(name, each) for name, each in model.named_parameters()], batch)

    for step in run.steps(validate):
        batches(step, model, ends)
        for name, parameter in model.named_parameters():
            if name not in shadow:
                shadow[name] = parameter.detach().clone()
            shadow[name] = 0.7 * shadow[name] + 0.3 * parameter.detach()


class Averages:
    """Averages of the weights, as many scripts have them."""

    def __init__(self, model: nn.Module):
        self.decay, self.shadow = 0.7, copies(model)

    def update(self, model: nn.Module) -> None:
        move(self.shadow, model)


def average_in_an_object(run: Run, ends: Ends) -> None:
    model = begin(run, network())
    averages = Averages(model)
    for step in run.steps(lambda batch: with_weights(model, averages.shadow, batch)):
        batches(step, model, ends)
        averages.update(model)


def average_with_a_bar(run: Run, ends: Ends) -> None:
    model = begin(run, network())
    averages = copies(model)
    for step in tqdm(run.steps(lambda batch: with_weights(model, averages, batch)), file=StringIO()):
        batches(step, model, ends)
        move(averages, model)


def average_by_partial(run: Run, ends: Ends) -> None:
    model = begin(run, network())
    averages = copies(model)
    for step in run.steps(partial(with_weights, model, averages)):
        batches(step, model, ends)
        move(averages, model)


def size_of_a_step(run: Run, ends: Ends) -> None:
    model = begin(run, network())
    size = 1.0

    def validate(batch: Any) -> Tensor:
        return (size * model(batch["x"][:, None] / 48) - 1).square().mean()

    for step in run.steps(validate):
        size = 0.5 + random.random()
        batches(step, model, ends, size)


def running_mean(run: Run, ends: Ends) -> None:
    model, mean = begin(run, network()), 0.0
    for step in run.steps():
        mean = 0.9 * mean + 0.1 * batches(step, model, ends)
        run.log({"mean": mean})


def window_of_losses(run: Run, ends: Ends) -> None:
    model, losses = begin(run, network()), deque[float](maxlen=2)
    for step in run.steps():
        losses.append(batches(step, model, ends))
        run.log({"mean": sum(losses) / len(losses)})


def list_of_losses(run: Run, ends: Ends) -> None:
    model, losses = begin(run, network()), list[float]()
    for step in run.steps():
        losses.append(batches(step, model, ends))
    run.log({"mean": sum(losses) / len(losses)})


def best_so_far(run: Run, ends: Ends) -> None:
    model, best = begin(run, network()), float("inf")

    def keep(done: int, means: Any) -> None:
        nonlocal best
        best = min(best, means["loss"] if means else best)

    for step in run.steps(lambda batch: model(batch["x"][:, None] / 48).square().mean(), keep):
        batches(step, model, ends)


def counter(run: Run, ends: Ends) -> None:
    model, count = begin(run, network()), 0
    for step in run.steps():
        batches(step, model, ends, factor=1 + count / 100)
        count += 1 + step.index % 2


def own_generator(run: Run, ends: Ends) -> None:
    model, chance = begin(run, network()), random.Random(5)
    for step in run.steps():
        batches(step, model, ends, factor=chance.random())


def generator_of_numpy(run: Run, ends: Ends) -> None:
    model, chance = begin(run, network()), np.random.default_rng(5)
    for step in run.steps():
        batches(step, model, ends, factor=chance.random())


FOUND = [
    *((average_in_a_list, "averages"), (average_in_a_dict, "shadow"), (average_in_an_object, "averages.shadow")),
    *((average_with_a_bar, "averages"), (average_by_partial, "averages")),
    *((size_of_a_step, "size"), (running_mean, "mean"), (window_of_losses, "losses")),
    *((list_of_losses, "losses"), (best_so_far, "best"), (counter, "count"), (own_generator, "chance")),
    (generator_of_numpy, "chance"),
]
"""Scripts, and the name of the variable that is lost."""


def kept_average(run: Run, ends: Ends) -> None:
    model = begin(run, network())
    averages = copies(model)

    def restore(value: list[Any], is_unfinished: bool) -> None:
        averages[:] = map(torch.tensor, value)

    run.state("averages", lambda: [average.tolist() for average in averages], restore)
    for step in run.steps(lambda batch: with_weights(model, averages, batch)):
        batches(step, model, ends)
        move(averages, model)


def kept_counter(run: Run, ends: Ends) -> None:
    model, turn = begin(run, network()), 0

    def restore(value: int, is_unfinished: bool) -> None:
        nonlocal turn
        turn = value

    run.state("turn", lambda: turn, restore)
    for step in run.steps():
        turn = (turn + 1) % 3
        batches(step, model, ends, factor=1 + turn)


def counter_by_restore(run: Run, ends: Ends) -> None:
    model = begin(run, network())
    count = run.restore()
    for step in run.steps():
        count += 1
        batches(step, model, ends, factor=1 + 1 / count)


def times(run: Run, ends: Ends) -> None:
    model, t0, t1, t2 = begin(run, network()), time.time(), time.perf_counter(), time.time_ns()
    for step in run.steps():
        batches(step, model, ends)
        step_s = time.time() - t0
        t0, t1, t2 = time.time(), time.perf_counter() - t1 + t1, time.time_ns() - t2 + t2
        assert step_s > 0


def cache(run: Run, ends: Ends) -> None:
    model, masks, seen, mask = begin(run, network()), dict[int, Tensor](), set[int](), None
    for step in run.steps():
        if mask is None:
            mask = torch.ones(3)
        if step.index not in masks:
            masks[step.index] = step.index * mask
        seen.add(step.index)
        batches(step, model, ends, factor=float(masks[step.index][0]))
        assert len(seen) <= step.index + 1


def made_later(run: Run, ends: Ends) -> None:
    model, mask, has_warned = begin(run, network()), None, False
    for step in run.steps():
        if step.index == 2:
            mask = torch.ones(3)
            if not has_warned:
                has_warned = True
        batches(step, model, ends, factor=1.0 if mask is None else float(mask.mean()))


def with_a_bar(run: Run, ends: Ends) -> None:
    model = begin(run, network())
    for step in tqdm(run.steps(), file=StringIO()):
        batches(step, model, ends)


def own_to_a_step(run: Run, ends: Ends) -> None:
    model, numbers, losses, table, total = begin(run, network()), {"loss": 0.0}, list[float](), torch.zeros(3), 0.0
    first, count = torch.zeros(()), 0
    for step in run.steps():
        losses.clear()
        table.zero_()
        total = 0.0
        count = 0
        for _ in range(2):
            first = torch.rand(())
            count += 1
        table += first
        numbers["loss"] = batches(step, model, ends)
        losses.append(numbers["loss"])
        total += sum(losses)
        run.log({**numbers, "total": total, "table": float(table[0]), "count": count, "first": float(first)})


def only_written(run: Run, ends: Ends) -> None:
    model, losses, by_step, numbers = begin(run, network()), list[float](), dict[int, float](), np.zeros(100)
    by_name: dict[str, list[float]] = {"loss": []}
    for step in run.steps():
        losses.append(batches(step, model, ends))
        by_step[step.index] = losses[-1] if step.index > 100 else 0.0
        numbers[step.index] = 1.0
        by_name["loss"].append(losses[-1])


class Progress:
    """Attributes that are assigned in each step before they are read."""

    def __init__(self) -> None:
        self.step, self.loss = 0, 0.0

    def line(self) -> str:
        return f"{self.step} {self.loss}"


def progress(run: Run, ends: Ends) -> None:
    model, bar, lines = begin(run, network()), Progress(), 0
    for step in run.steps():
        bar.step = step.index
        bar.loss = batches(step, model, ends)
        lines = len(bar.line())
        assert lines


def left_from_the_last_step(run: Run, ends: Ends) -> None:
    model = begin(run, network())
    for step in run.steps():
        for batch in step.batches():
            loss = (model(batch["x"][:, None] / 48) - 1).square().mean()
            step.backward(loss)
            ends(step.index)
        step.update()
        assert loss.item() >= 0


def set_by_a_function(run: Run, ends: Ends) -> None:
    model, size = begin(run, network()), 1.0

    def draw() -> None:
        nonlocal size
        size = 0.5 + random.random()

    for step in run.steps():
        draw()
        batches(step, model, ends, size)


RIGHT = [
    *(kept_average, kept_counter, counter_by_restore, times, cache, made_later, own_to_a_step),
    *(only_written, progress, with_a_bar, left_from_the_last_step, set_by_a_function),
]
ENDS = ["leaves", "is lost"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = numbers_job(tmp_path, epochs=4)
    data = replace(job.data, validation=job.data.train)
    checkpoint = CheckpointSpec(every_steps=1000, snapshot_every_steps=0)
    return replace(job, data=data, validation=ValidationSpec(every_steps=2), checkpoint=checkpoint)


def in_groups(job: Job, train: Callable[[Run, Ends], None], end: str, lasts: tuple[int, ...]) -> None:
    """Train in groups of one process, each of which ends in or after the step of such an index."""
    worker = WorkerState(is_run=True, controller=object())
    for last in (*lasts, None):

        def ends(index: int, last: int | None = last) -> None:
            if end == "is lost" and index == last:
                raise GroupEndedError("another rank was lost")
            worker.request = Request(leaves=index == last)

        with local_world(CPU):
            worker.join_group()
            run = cpu_run(job, worker=worker)
            with suppress(GroupEndedError, LeaveGroup):
                train(run, ends)
            run.hand_over()
            run.free()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("train", "name"), FOUND)
def test_a_variable_that_is_lost_is_named_once(
    train: Callable[[Run, Ends], None], name: str, end: str, job: Job
) -> None:
    in_groups(job, train, end, (5, 9, 12))
    assert lost_variables(job.run_url) == [name]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("train", RIGHT)
def test_no_other_variable_is_named(train: Callable[[Run, Ends], None], end: str, job: Job) -> None:
    in_groups(job, train, end, (5, 9, 12))
    assert lost_variables(job.run_url) == []


@pytest.mark.parametrize("train", [average_in_a_list, size_of_a_step])
def test_the_validation_that_reads_a_lost_variable_differs(
    train: Callable[[Run, Ends], None], job: Job, tmp_path: Path
) -> None:
    """This is what the event is about: no step differs."""
    alone = replace(job, run_url=str(tmp_path / "alone"))
    in_groups(alone, train, "leaves", ())
    in_groups(job, train, "leaves", (5,))
    one, other = (read_ledger(Store(each.run_url)) for each in (alone, job))
    assert one.steps["loss"].to_pylist() == other.steps["loss"].to_pylist()
    validations = [[event.loss for event in events_of(each.events, ValidationEvent)] for each in (one, other)]
    assert len(validations[0]) == len(validations[1])
    assert validations[0] != validations[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_shows_what_its_group_has_kept_itself(rank: int, tmp_path: Path) -> None:
    """The other worker has seen how the average moved, whichever rank it gets."""
    kept, lost = "an average in the state of the script", "an average that is lost"
    jobs = {name: replace(SCRIPTS[name].job(tmp_path / name), sharding=ShardingSpec(3)) for name in (kept, lost)}
    with Workers(tmp_path) as workers:
        for name, job in jobs.items():
            members = [workers.start() for _ in range(2)]
            ends = workers.train(members, name, job, fault=Fault("before the reduction", rank=rank, step=5))
            assert [end and end.how for end in ends] == [None if each == rank else "broken" for each in range(2)]
            workers.train([members[1 - rank], workers.start()], name, job)
    numbers = {name: numbers_of(job) for name, job in jobs.items()}
    assert numbers[lost]["loss"] == numbers[kept]["loss"]
    assert numbers[lost]["validation.average"] != numbers[kept]["validation.average"]
    assert {name: lost_variables(job.run_url) for name, job in jobs.items()} == {kept: [], lost: ["average"]}
