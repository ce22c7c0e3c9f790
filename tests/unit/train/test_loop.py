"""Tests of the training loop in one process, without Ray: the rules for a step, and the values that it records."""

import gc
import json
import math
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
import torch
from numbers_job import begin, cpu_run, numbers_job, run_batches, trained, write_numbers
from torch import nn
from torch.optim.swa_utils import AveragedModel

from undula.data.spec import ValidationSpec
from undula.errors import RunError, StorageError, SupersededError, UsageError
from undula.recovery.worker_state import GroupEndedError, LeaveGroup, Request, WorkerState
from undula.state import checkpoint
from undula.state.commit import find_commits
from undula.state.events import EndEvent, LogEvent, StartEvent, ValidationEvent, WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train.job import Job
from undula.train.run import Run, Step
from undula.train.tracebacks import is_of_collective

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return numbers_job(tmp_path)


def steps_of(job: Job, worker: WorkerState | None = None) -> Iterator[tuple[Run, nn.Module, Step]]:
    run = cpu_run(job, worker=worker)
    model = begin(run)
    for step in run.steps():
        yield run, model, step


def train(job: Job, after_backward: Callable[[Step, int], None] = lambda step, number: None) -> None:
    for _, model, step in steps_of(job):
        for number, batch in enumerate(step.batches()):
            step.backward(model(batch["x"][:, None] / 48).square().mean())
            after_backward(step, number)
        step.update()


@pytest.mark.parametrize("last_step", ["short", "drop", "wrap"])
def test_a_validation_uses_every_sample_once(tmp_path: Path, last_step: str) -> None:
    """Training data may leave out or repeat samples of the last step of an epoch, which has 8 of 20 samples here."""
    job = numbers_job(tmp_path, global_batch=20, last_step=last_step, max_steps=1)
    run = cpu_run(replace(job, data=replace(job.data, validation=job.data.train)))
    model = begin(run)
    validated: list[float] = []

    def loss(batch):
        validated.extend(batch["x"].tolist())
        return model(batch["x"][:, None]).mean()

    for step in run.steps(validate=loss):
        assert sorted(validated) == list(range(48))
        run_batches(step, model)
        step.update()
    assert sorted(validated) == sorted(2 * list(range(48)))


def test_an_epoch_uses_every_sample_once(job: Job) -> None:
    seen: list[float] = []
    for _, model, step in steps_of(job):
        for batch in step.batches():
            seen += batch["x"].tolist()
            step.backward(model(batch["x"][:, None]).mean())
        step.update()
    assert sorted(seen) == list(range(48))
    assert read_ledger(Store(job.run_url)).steps["step_samples"].to_pylist() == [12] * 4


def test_values_are_averaged_over_samples_whether_logged_before_or_after_backward(job: Job) -> None:
    train(job, after_backward=lambda step, number: step.log(number=number))
    logged = read_ledger(Store(job.run_url)).steps["logged"].to_pylist()
    assert [json.loads(text) for text in logged] == [{"number": 1.5}] * 4


def test_a_step_that_does_not_use_all_its_batches_is_refused(job: Job) -> None:
    steps = steps_of(job)
    _, model, step = next(steps)
    for batch in step.batches():
        step.backward(model(batch["x"][:, None] / 48).square().mean())
        break
    with pytest.raises(UsageError, match=r"before the loop over step\.batches\(\)"):
        step.update()
    steps.close()


def test_the_batches_of_a_step_can_be_used_once(job: Job) -> None:
    steps = steps_of(job)
    _, model, step = next(steps)
    run_batches(step, model)
    with pytest.raises(UsageError, match="called twice"):
        next(step.batches())
    steps.close()


@pytest.mark.parametrize("ledger", ["whole", "unreadable"])
def test_a_validation_that_a_lost_group_owed_is_made_up_for(job: Job, ledger: str) -> None:
    """Also if the ledger cannot be read, which would say whether it is owed: the run goes on."""
    job = replace(job, data=replace(job.data, validation=job.data.train), validation=ValidationSpec(every_steps=1))
    worker, lost = WorkerState(), []

    def train_group() -> None:
        run, done = cpu_run(job, worker=worker), 0
        model = begin(run)

        def loss(batch):
            is_validation = not torch.is_grad_enabled()
            if is_validation and done == 2 and not lost:
                lost.append(True)
                raise GroupEndedError
            return model(batch["x"][:, None] / 48).square().mean()

        try:
            for step in run.steps(validate=loss):
                for batch in step.batches():
                    step.backward(loss(batch))
                step.update()
                done = step.index + 1
        except GroupEndedError:
            run.hand_over()

    train_group()
    unreadable, store = "ledger/steps-000000-00000.parquet", Store(job.run_url)
    if ledger == "unreadable":
        store.write(unreadable, b"half of a fi")
    train_group()
    store.delete(unreadable)
    events = events_of(read_ledger(store).events, ValidationEvent)
    assert [event.step for event in events] == [0, 1, 2, 3, 4]


def test_a_step_is_committed_once(job: Job) -> None:
    steps = steps_of(job)
    _, model, step = next(steps)
    run_batches(step, model)
    step.update()
    with pytest.raises(UsageError, match=r"step\.update\(\) was called twice in step 0"):
        step.update()
    steps.close()


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda output: output, r"a tensor of shape \(\d+, 1\)"),
        (lambda output: output.mean().item(), "an object of type float"),
    ],
)
def test_a_loss_is_a_tensor_with_one_element(job: Job, wrong: Callable[[torch.Tensor], Any], found: str) -> None:
    def run_step(reduced: Callable[[torch.Tensor], Any]) -> None:
        for batch in step.batches():
            step.backward(reduced(model(batch["x"][:, None])))

    steps = steps_of(job)
    _, model, step = next(steps)
    run_step(lambda output: output.mean(0))
    step.update()
    _, model, step = next(steps)
    with pytest.raises(UsageError, match=rf"got {found}; pass the mean loss"):
        run_step(wrong)
    steps.close()


def test_a_validation_function_without_data_is_a_warning(job: Job) -> None:
    run = cpu_run(job)
    model = begin(run)
    for step in run.steps(validate=lambda batch: model(batch["x"][:, None]).mean()):
        run_batches(step, model)
        step.update()
    (warning,) = events_of(read_ledger(Store(job.run_url)).events, WarningEvent)
    assert warning.message.startswith(
        "Nothing is validated: the script has a validation function, but there are no validation data"
    )


def test_a_run_has_one_optimizer_and_a_model_without_wrapper(job: Job) -> None:
    run = cpu_run(job)
    with pytest.raises(UsageError, match="pass the module that it wraps"):
        run.model(nn.parallel.DistributedDataParallel(nn.Linear(1, 1)))
    model = begin(run)
    with pytest.raises(UsageError, match="use one optimizer with several parameter groups"):
        run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))


def test_a_group_lost_before_its_first_commit_leaves_the_state_of_a_fresh_start(job: Job) -> None:
    """Reading the state of AdamW before its first step must not count as a step."""
    worker = WorkerState()
    run = cpu_run(job, worker=worker)
    model = run.model(nn.Linear(1, 1))
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
    steps = run.steps()
    next(next(steps).batches())
    run.hand_over()
    assert worker.held is None
    steps.close()


def test_a_group_that_fails_before_its_attempt_begins_leaves_the_state_under_its_former_age(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next group would take it for the work of an attempt that does not belong to the run."""
    job = replace(job, checkpoint=CheckpointSpec(every_steps=100, snapshot_every_steps=0))
    worker = WorkerState()

    def handed_over(until: int) -> None:
        worker.join_group()
        run = cpu_run(job, worker=worker)
        model = begin(run)
        try:
            for step in run.steps():
                run_batches(step, model)
                worker.request = Request(leaves=step.index == until)
                step.update()
        except (LeaveGroup, StorageError):
            run.hand_over()

    def fail(*_: object) -> None:
        raise StorageError("503 SlowDown")

    handed_over(until=1)
    assert worker.held is not None
    assert worker.held.age == (1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "begin", fail)
        handed_over(until=2)
    assert worker.held.age == (1, 2)
    handed_over(until=2)
    assert worker.held.age == (3, 3)
    assert read_ledger(Store(job.run_url)).steps["attempt"].to_pylist()[:2] == [1, 1]


def test_a_run_that_ends_before_its_plan_validates_and_saves_there_and_can_go_on(job: Job, tmp_path: Path) -> None:
    """As in a smoke test: the steps are those of the whole plan, with its learning rates."""
    whole = replace(job, run_url=str(tmp_path / "whole"), run_id=token_hex(8))
    train(whole)
    train(replace(job, ends_after=1))
    store = Store(job.run_url)
    ledger = read_ledger(store)
    assert ledger.steps["lr"].to_pylist() == read_ledger(Store(whole.run_url)).steps["lr"].to_pylist()[:1]
    assert [commit.step for commit in find_commits(store)[0]] == [1]
    assert [event.step for event in events_of(ledger.events, EndEvent)] == [1]
    train(replace(job, ends_after=1))
    assert read_ledger(store).steps["step"].to_pylist() == [0], "there is no further step"
    train(job)
    expected = read_ledger(Store(whole.run_url)).steps
    assert read_ledger(store).steps["weights_digest"].to_pylist()[-1] == expected["weights_digest"].to_pylist()[-1]


def test_a_finished_run_holds_no_model(job: Job) -> None:
    worker = WorkerState()
    steps = steps_of(job, worker)
    run, model, step = next(steps)
    run_batches(step, model)
    step.update()
    run, model, step = next(steps)
    steps.close()
    run.hand_over()
    run.free()
    assert worker.held is not None
    worker.held = None
    held = weakref.ref(model)
    del model, step, steps
    gc.collect()  # a worker does the same when it joins the next group, because torch leaves reference cycles
    assert held() is None


class Centre(nn.Module):
    """Part of a loss that keeps a mean of the batches, as that of DINO does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("weight", torch.ones(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * values.detach().mean()
        return values - self.mean * self.weight


@pytest.mark.parametrize("place", ["beside", "average", "inside", "constant"])
def test_a_module_beside_the_model_whose_state_changes_is_told(job: Job, place: str) -> None:
    run, net, centre = cpu_run(job), nn.Linear(1, 1), Centre()
    begin(run, nn.ModuleDict({"net": net, "centre": centre}) if place == "inside" else net)
    average = AveragedModel(net) if place == "average" else None
    for step in run.steps():
        for batch in step.batches():
            out = net(batch["x"][:, None] / 48)
            step.backward((centre(out) if place in ("beside", "inside") else out * centre.weight).square().mean())
        step.update()
        if average is not None:
            average.update_parameters(net)
    warnings = events_of(read_ledger(Store(job.run_url)).events, WarningEvent)
    told = [event.detail for event in warnings if event.code == "state_beside_model"]
    assert told == {"beside": ["Centre.mean"], "average": ["AveragedModel.n_averaged"]}.get(place, [])


def test_numbers_that_a_script_logs_after_its_last_step_are_kept(job: Job) -> None:
    run = cpu_run(job)
    for _ in trained(run):
        pass
    run.log({"test_accuracy": 0.5})
    run.free()
    events = events_of(read_ledger(Store(job.run_url)).events, LogEvent)
    assert [(event.step, event.values) for event in events] == [(4, {"test_accuracy": 0.5})]


def test_a_rank_that_outlives_its_group_ends_at_the_next_batch(job: Job) -> None:
    worker = WorkerState()
    steps = steps_of(job, worker)
    _, model, step = next(steps)
    batches = step.batches()
    step.backward(model(next(batches)["x"][:, None]).mean())
    worker.has_ended = True
    with pytest.raises(GroupEndedError) as caught:
        next(batches)
    assert is_of_collective(caught.value)
    steps.close()


def test_a_run_ends_at_its_next_checkpoint_if_a_newer_attempt_has_begun(job: Job) -> None:
    """The newer attempt trains to the end, and nothing of what the older one does meanwhile is in the run."""
    job = replace(job, plan=replace(job.plan, epochs=2))
    older = steps_of(job)

    def train_older(num_steps: int) -> None:
        for _, (_, model, step) in zip(range(num_steps), older, strict=False):
            run_batches(step, model)
            step.update()

    train_older(3)  # the checkpoint of step 2 is written from the start of the third step on
    store = Store(job.run_url)
    deadline = time.monotonic() + 30
    while not find_commits(store)[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    train(replace(job, run_id=token_hex(8)))  # as on another machine, whose memory has no snapshots
    with pytest.raises(SupersededError, match=r"^attempt 2 of .* was started on .*, so the older attempt 1 ends"):
        train_older(6)  # at the latest where the run ends, if checkpoints are slow
    ledger = read_ledger(store)
    assert ledger.steps["step"].to_pylist() == list(range(8))
    assert ledger.steps["attempt"].to_pylist() == [1] * 2 + [2] * 6
    commits, damaged = find_commits(store)
    assert ([commit.attempt for commit in commits], damaged) == ([2, 2], {})
    assert [event.attempt for event in events_of(ledger.events, StartEvent)] == [1, 2]


def test_a_group_of_an_older_submission_does_not_start(job: Job) -> None:
    Store(job.run_url).write("job.json", b'{"submission": "newer"}')
    with pytest.raises(SupersededError, match="was submitted again"):
        cpu_run(replace(job, submission="older"))
    train(replace(job, submission="newer"))


def test_a_run_does_not_continue_with_other_data(job: Job, tmp_path: Path) -> None:
    steps = steps_of(job)
    for (_, model, step), _ in zip(steps, range(3), strict=False):
        run_batches(step, model)
        step.update()
    steps.close()
    write_numbers(tmp_path, 60)
    with pytest.raises(RunError, match="belongs to another plan or other data"):
        train(job)


@pytest.mark.parametrize(("bad_from", "most", "ends_at"), [(9, 4, 14), (16, 4, 20), (9, 20, 20)])
def test_a_run_whose_gradients_are_not_finite_fails_and_keeps_its_last_good_checkpoint(
    tmp_path: Path, bad_from: int, most: int, ends_at: int
) -> None:
    job = numbers_job(tmp_path, epochs=5)  # 20 steps
    spec = CheckpointSpec(every_steps=2, keep=1, max_non_finite_steps=most)
    job = replace(job, checkpoint=spec)
    done = []

    def train_badly() -> None:
        for _, model, step in steps_of(job):
            for batch in step.batches():
                factor = math.nan if step.index >= bad_from else 1.0
                step.backward(model(batch["x"][:, None] / 48).square().mean() * factor)
            step.update()
            done.append(step.index + 1)

    with pytest.raises(RunError, match=f"the gradient has not been finite since step {bad_from}, so that the weights"):
        train_badly()
    assert done[-1] == ends_at
    store = Store(job.run_url)
    (commit,) = find_commits(store)[0]
    assert 0 < commit.step <= bad_from
    warnings = [event for event in events_of(read_ledger(store).events, WarningEvent) if "non_finite" in event.code]
    assert [event.step for event in warnings] == [bad_from + 1]


def test_a_gradient_that_is_not_finite_once_ends_nothing(tmp_path: Path) -> None:
    """The script leaves the weights as they are in such a step."""
    job = replace(numbers_job(tmp_path, epochs=1), checkpoint=CheckpointSpec(max_non_finite_steps=1))
    for _, model, step in steps_of(job):
        for batch in step.batches():
            step.backward(model(batch["x"][:, None] / 48).square().mean() * (math.inf if step.index == 2 else 1.0))
        if not step.reduce().isfinite():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()
        step.update()
    (commit,) = find_commits(Store(job.run_url))[0]
    assert commit.step == 4
