"""Tests of a script's work between two steps: it is done once, and what it has half done is not handed over."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from numbers_job import begin, cpu_run, network, numbers_job, run_batches
from torch import Tensor, nn

from undula.data.spec import ValidationSpec
from undula.errors import UsageError
from undula.parallel.spec import ShardingSpec
from undula.recovery.snapshot import find_snapshots, folder_of
from undula.recovery.worker_state import GroupEndedError, LeaveGroup, Request, WorkerState
from undula.state.events import StartEvent, ValidationEvent, WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import local_world

NO_COPIES = CheckpointSpec(every_steps=1000, snapshot_every_steps=0)
STEPS = 8


class Averaged(nn.Module):
    """Network with an average of its weights in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.register_buffer("average", torch.zeros(7, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def move(self) -> None:
        self.average.lerp_(self.net[0].weight.detach(), 0.1)  # type: ignore[index,union-attr,operator]


@dataclass
class Script:
    """Script whose groups run one after another in this process."""

    job: Job
    worker: WorkerState = field(default_factory=lambda: WorkerState(is_run=True, controller=object()))
    after_update: Callable[[Run, Averaged, int], None] = lambda run, model, index: None
    """Work in the loop after `step.update()`."""
    after_step: Callable[[Run, Averaged, int], None] | None = None
    validate: Callable[[Averaged, Any], Tensor] | None = None
    in_batch: Callable[[Run, Averaged, int], None] = lambda run, model, index: None
    before_batches: Callable[[Run, Averaged, int], None] = lambda run, model, index: None
    has_state: bool = False

    def group(self) -> dict[str, Tensor] | None:
        """Run a group to its end, and hand its state over if it does not come to the end of the plan; else return the state."""
        with local_world(torch.device("cpu")):
            self.worker.join_group()
            run = cpu_run(self.job, worker=self.worker)
            model = Averaged()
            try:
                self._train(run, model)
            except (GroupEndedError, LeaveGroup):
                run.hand_over()
                return None
            finally:
                run.free()
        return {name: value.clone() for name, value in model.state_dict().items()}

    def _train(self, run: Run, module: Averaged) -> None:
        model: Any = run.model(module)
        run.optimizer(torch.optim.SGD(model.net.parameters(), lr=0.1, momentum=0.9))
        if self.has_state:
            run.state("nothing", lambda: 0, lambda value, is_unfinished: None)
        work, loss = self.after_step, self.validate
        steps = run.steps(
            None if loss is None else lambda batch: loss(model, batch),
            None if work is None else lambda done, means: work(run, model, done),
        )
        for step in steps:
            self.before_batches(run, model, step.index)
            for batch in step.batches():
                step.backward(model(batch["x"][:, None] / 48).square().mean())
                self.in_batch(run, model, step.index)
            step.update()
            self.after_update(run, model, step.index)

    def events(self, kind: type[Any]) -> list[Any]:
        return events_of(read_ledger(Store(self.job.run_url)).events, kind)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return replace(numbers_job(tmp_path, epochs=2), checkpoint=NO_COPIES)


def alone(script: Script) -> dict[str, Tensor]:
    """Return the state at the end of an uninterrupted run of a script."""
    job = replace(script.job, run_url=f"{script.job.run_url}-alone")
    found = replace(script, job=job, worker=WorkerState(is_run=True, controller=object())).group()
    assert found is not None
    return found


def assert_equal(found: dict[str, Tensor] | None, expected: dict[str, Tensor]) -> None:
    assert found is not None
    assert {name for name, value in expected.items() if not torch.equal(found[name], value)} == set()


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls another one only the first time."""
    calls = iter([function])
    return lambda: next(calls, lambda: None)()


def lose_a_rank() -> None:
    raise GroupEndedError("another rank was lost while the script waited for it")


@pytest.mark.parametrize("has_state", [False, True])
def test_work_in_after_step_is_done_once_although_a_rank_is_lost_within_it(job: Job, has_state: bool) -> None:
    def move(run: Run, model: Averaged, done: int) -> None:
        model.move()

    def move_and_fail(run: Run, model: Averaged, done: int) -> None:
        model.move()
        if done == 3:
            fail()

    fail = once(lose_a_rank)
    script = Script(job, after_step=move_and_fail, has_state=has_state)
    assert script.group() is None
    assert script.worker.held is not None
    assert_equal(script.group(), alone(Script(job, after_step=move)))
    assert script.events(StartEvent)[-1].step == 3


def test_weights_that_a_script_has_swapped_are_not_handed_over(job: Job) -> None:
    """The run goes on from the last snapshot, and comes to the weights of a run without faults."""

    def validate_by_itself(run: Run, model: Averaged, index: int) -> None:
        own = [each.detach().clone() for each in model.net.parameters()]
        for each in model.net.parameters():
            each.data.fill_(777.0)
        if index == 4:
            fail()
        for each, value in zip(model.net.parameters(), own, strict=True):
            each.data.copy_(value)

    fail = once(lose_a_rank)
    snapshots = CheckpointSpec(every_steps=1000, snapshot_every_steps=1)
    for has_state in (False, True):
        fail = once(lose_a_rank)
        its_own = replace(
            job, checkpoint=snapshots, run_url=f"{job.run_url}-{has_state}", run_id=f"{job.run_id}{has_state}"
        )
        script = Script(its_own, after_update=validate_by_itself, has_state=has_state)
        assert script.group() is None
        assert script.worker.held is None
        (warning,) = [each for each in script.events(WarningEvent) if each.code == "unfinished_work"]
        assert warning.step == 5
        assert_equal(script.group(), alone(script))


def test_work_after_an_update_is_not_lost_with_a_script_without_state(job: Job) -> None:
    """The script cannot be asked to repeat it, so the run goes on from an older state."""

    def move_and_wait(run: Run, model: Averaged, index: int) -> None:
        model.move()
        if index == 4:
            fail()

    fail = once(lose_a_rank)
    script = Script(replace(job, checkpoint=replace(NO_COPIES, every_steps=2)), after_update=move_and_wait)
    assert script.group() is None
    assert_equal(script.group(), alone(script))
    assert script.events(StartEvent)[-1].origin == "the checkpoint"


def test_a_group_that_ends_while_the_script_works_hands_over_what_the_script_has_finished(job: Job) -> None:
    """The script notices the end only when it asks for the next step, when its work is done."""

    def move_and_end(run: Run, model: Averaged, index: int) -> None:
        model.move()
        if index == 3:
            end()

    def end_group() -> None:
        script.worker.has_ended = True

    end = once(end_group)
    script = Script(job, after_update=move_and_end)
    assert script.group() is None
    assert script.worker.held is not None
    assert script.worker.held.step == 4
    assert_equal(script.group(), alone(Script(job, after_update=lambda run, model, index: model.move())))


@pytest.mark.parametrize("has_state", [False, True])
def test_repeated_work_is_not_owed_again(job: Job, has_state: bool) -> None:
    calls: list[int] = []

    def move(run: Run, model: Averaged, done: int) -> None:
        calls.append(done)
        model.move()
        if done == 3:
            fail()

    def wait_for_the_others(run: Run, model: Averaged, index: int) -> None:
        if index == 3:
            fail_again()

    fail, fail_again = once(lose_a_rank), once(lose_a_rank)
    script = Script(job, after_step=move, before_batches=wait_for_the_others, has_state=has_state)
    assert script.group() is None
    assert script.group() is None
    assert_equal(script.group(), alone(Script(job, after_step=lambda run, model, done: model.move())))
    assert calls == [1, 2, 3, 3, 4, 5, 6, 7, 8]


def test_buffers_that_change_within_a_step_are_handed_over_as_they_were_before_it(job: Job) -> None:
    def lose_in_step_3(run: Run, model: Averaged, index: int) -> None:
        if index == 3:
            model.average.add_(1)  # type: ignore[operator]
            fail()

    fail = once(lose_a_rank)
    script = Script(job, in_batch=lose_in_step_3, after_update=lambda run, model, index: model.move())
    assert script.group() is None
    assert script.worker.held is not None
    assert_equal(script.group(), alone(Script(job, after_update=lambda run, model, index: model.move())))


def validated(job: Job, every_steps: int) -> Job:
    data = replace(job.data, validation=job.data.train)
    return replace(job, data=data, validation=ValidationSpec(every_steps=every_steps))


def loss_of(model: Averaged, batch: Any) -> Tensor:
    return model(batch["x"][:, None] / 48).square().mean()


def test_a_snapshot_is_whole_before_a_validation_changes_the_weights(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_all = torch._foreach_copy_

    def copy_slowly(targets: list[Tensor], sources: list[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            if threading.current_thread().name.startswith("undula-snapshot"):
                time.sleep(0.05)  # stands for a large state
            copy_all([target], [source])

    def on_the_average(model: Averaged, batch: Any) -> Tensor:
        own = [each.detach().clone() for each in model.net.parameters()]
        for each in model.net.parameters():
            each.data.fill_(777.0)
        try:
            return loss_of(model, batch)
        finally:
            for each, value in zip(model.net.parameters(), own, strict=True):
                each.data.copy_(value)

    monkeypatch.setattr(torch, "_foreach_copy_", copy_slowly)
    job = replace(validated(job, 3), checkpoint=CheckpointSpec(every_steps=1000, snapshot_every_steps=1))
    ended: list[Tensor] = []

    def look(run: Run, model: Averaged, index: int) -> None:
        if index == 3:
            ended.append(model.net[0].weight.detach().clone())  # type: ignore[arg-type]
            (found,) = (
                each for each in find_snapshots(folder_of(job.run_url, job.run_id), plan(run)) if each.age[1] == 3
            )
            pieces = found.load().pieces
            assert not any((piece.tensor == 777.0).any() for piece in pieces.values())
            lose_a_rank()

    def plan(run: Run) -> str:
        return run._session.setup.plan_digest

    assert Script(job, validate=on_the_average, in_batch=look).group() is None
    assert ended


def test_random_numbers_of_the_script_are_the_same_after_a_hand_over(job: Job) -> None:
    drawn: dict[str, list[float]] = {}

    def draw(name: str, done: int) -> None:
        drawn.setdefault(f"{name} {done}", []).append(random.random() + float(torch.rand(())))

    def in_batch(run: Run, model: Averaged, index: int) -> None:
        if index == 3:
            fail()

    fail = once(lose_a_rank)
    script = Script(
        job,
        in_batch=in_batch,
        after_update=lambda run, model, index: draw("after the update", index),
        after_step=lambda run, model, done: draw("after_step", done),
    )
    script.group()
    script.group()
    alone(script)
    assert len(drawn) == 2 * STEPS
    assert all(len(set(numbers)) == 1 for numbers in drawn.values())


def test_ranks_that_have_agreed_to_leave_do_so_before_a_validation(job: Job) -> None:
    validations: list[int] = []

    def ask(run: Run, model: Averaged, index: int) -> None:
        if index == 2 and not script.worker.held and len(validations) == 1:
            script.worker.request = Request(leaves=True, until=0.0)

    def after(run: Run, model: Averaged, done: int) -> None:
        worked.append(done)

    def counting(model: Averaged, batch: Any) -> Tensor:
        if batch["x"].min() == 0:
            validations.append(1)
        return loss_of(model, batch)

    worked: list[int] = []
    script = Script(validated(job, 3), in_batch=ask, validate=counting, after_step=after)
    assert script.group() is None
    assert script.worker.held is not None
    assert (script.worker.held.step, len(validations), worked) == (3, 1, [1, 2])
    assert_equal(script.group(), alone(Script(validated(job, 3), validate=loss_of)))
    assert [event.step for event in script.events(ValidationEvent)] == [0, 3, 6, 8]
    assert worked == list(range(1, STEPS + 1))


def test_a_notice_ends_a_validation_which_the_next_group_does(job: Job) -> None:
    batches: list[int] = []

    def slow(model: Averaged, batch: Any) -> Tensor:
        if steps_done[-1] == 3:
            batches.append(1)
            if len(batches) == 2:
                script.worker.request = Request(leaves=True, until=time.time())
        return loss_of(model, batch)

    steps_done = [0]
    script = Script(
        validated(job, 3), validate=slow, after_update=lambda run, model, index: steps_done.append(index + 1)
    )
    assert script.group() is None
    assert script.worker.held is not None
    assert (script.worker.held.step, len(batches)) == (3, 2)
    assert_equal(script.group(), alone(Script(validated(job, 3), validate=loss_of)))
    assert [event.step for event in script.events(ValidationEvent)] == [0, 3, 6, 8]


@pytest.mark.parametrize("has_after_step", [False, True])
def test_a_validation_with_other_weights_in_the_model_is_ended_before_the_ranks_leave(
    job: Job, has_after_step: bool
) -> None:
    """Otherwise these weights would be handed over, or no weights at all."""
    own: list[Tensor] = []
    steps_done = [0]

    def with_other_weights(model: Averaged, batch: Any) -> Tensor:
        if steps_done[-1] == 3 and not own:
            own.extend(each.detach().clone() for each in model.net.parameters())
            for each in model.net.parameters():
                each.data.fill_(777.0)
            script.worker.request = Request(leaves=True, until=time.time())
        return model.net[0].weight.sum()  # type: ignore[index,return-value]

    def put_back(run: Run, model: Averaged, index: int) -> None:
        for each, value in zip(model.net.parameters(), own, strict=False):
            each.data.copy_(value)
        own.clear()

    def count(run: Run, model: Averaged, index: int) -> None:
        steps_done.append(index + 1)

    script = Script(
        validated(job, 3),
        validate=with_other_weights,
        after_update=count,
        after_step=put_back if has_after_step else None,
    )
    assert script.group() is None
    assert script.worker.held is not None
    assert script.worker.held.step == 4
    weight = script.worker.held.state.pieces["model.net.0.weight"].tensor
    assert (weight.max() > 700) == (not has_after_step)  # without it, the script has put these weights in for good


def test_a_validation_leaves_buffers_as_they_were(job: Job) -> None:
    def changing(model: Averaged, batch: Any) -> Tensor:
        assert not model.average.any()  # type: ignore[operator]
        model.average.add_(1)  # type: ignore[operator]
        return loss_of(model, batch)

    assert_equal(Script(validated(job, 2), validate=changing).group(), alone(Script(job)))


def test_a_run_that_changes_parameters_before_its_batches_keeps_no_snapshot_of_that_step(job: Job) -> None:
    job = replace(job, checkpoint=CheckpointSpec(every_steps=1000, snapshot_every_steps=1))
    with local_world(torch.device("cpu")), suppress(Exception):
        run = cpu_run(job)
        model = begin(run, network())
        for step in run.steps():
            if step.index == 2:
                model[0].weight.data.mul_(0.5)  # type: ignore[union-attr,operator]
            run_batches(step, model)
            step.update()
    found = find_snapshots(folder_of(job.run_url, job.run_id), run._session.setup.plan_digest)
    run.free()
    assert [each.age[1] for each in found] == [1]


class _Twins(nn.Module):
    """Two layers of one shape, in a module that can be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("is_late", [False, True])
def test_weights_that_are_tied_after_the_model_was_given_are_named(
    job: Job, stage: Literal[0, 3], is_late: bool
) -> None:
    """Before or after the script has made its optimizer."""
    with local_world(torch.device("cpu")):
        run = cpu_run(replace(job, sharding=ShardingSpec(stage)))
        model = run.model(_Twins())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_late else None
        model.get_submodule("other").weight = model.get_submodule("one").weight
        run.optimizer(optimizer or torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(UsageError, match=r"the model has lost its parameter 'other\.weight' since run\.model\(\)"):
            next(run.steps())
        run.free()
