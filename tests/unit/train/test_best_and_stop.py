"""Tests of checkpoint.keep_best and stop: the same step and weights at any world size and through SIGKILL, on ranks without Ray."""

import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
from night import at_night
from numbers_job import cpu_run, numbers_job
from ranks import forks
from torch import Tensor, nn

from undula import load_weights
from undula.data.spec import ValidationSpec
from undula.errors import CheckpointError, RunError, StorageError, UsageError
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state import checkpoint
from undula.state.commit import find_commits
from undula.state.events import EndEvent, ValidationEvent
from undula.state.export import export_weights
from undula.state.goals import GoalSpec, StopSpec
from undula.state.ledger import events_of, last_event, read_ledger
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train import boundary, saver
from undula.train.job import Job

Moment: TypeAlias = Literal["the validation", "the checkpoint", "the step after it"]
GOAL = GoalSpec("height", "max")
BEST, END = 8, 14
"""Steps at which `height` has its maximum, and at which the run stops."""


def job_in(folder: Path) -> Job:
    job = numbers_job(folder, global_batch=8, epochs=5)
    return replace(
        job,
        deterministic=True,
        data=replace(job.data, validation=job.data.train),
        validation=ValidationSpec(every_steps=2),
        checkpoint=CheckpointSpec(every_steps=1000, snapshot_every_steps=1, keep=1, keep_best=GOAL),
        stop=StopSpec(patience=3, metric="height", mode="max"),
    )


def means(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the loss, and a mean that is highest in the middle of the training: the weight moves away from 0.4, and past 0.3."""
    weight = next(model.parameters()).detach()
    return {"loss": model(x[:, None] / 48).square().mean(), "height": -(weight[0, 0] - TOP).abs() + 0 * x.mean()}


def start(job: Job, rank: int, world_size: int, worker: WorkerState | None = None) -> tuple[Any, nn.Module]:
    run = cpu_run(job, rank, world_size, worker)
    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, 0.4)
    nn.init.constant_(module.bias, 0.1)
    model = run.model(module)
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    return run, model


TOP = 0.2527
"""Weight that the model has after about BEST steps."""


def _train(rank: int, world_size: int, job: Job, killed_in: Moment | None = None) -> None:
    run, model = start(job, rank, world_size)
    done = 0

    def validate(batch: Mapping[str, Any]) -> dict[str, Tensor]:
        if done == BEST and killed_in == "the validation" and rank == world_size - 1:
            signal.raise_signal(signal.SIGKILL)
        return means(model, batch["x"])

    if killed_in == "the checkpoint" and rank == world_size - 1:
        write = checkpoint.write_share

        def killing(store: Store, folder: str, *arguments: Any) -> Any:
            if checkpoint.step_of(folder) == BEST:
                signal.raise_signal(signal.SIGKILL)
            return write(store, folder, *arguments)

        checkpoint.write_share = killing
    for step in run.steps(validate=validate):
        if step.index == BEST and killed_in == "the step after it" and rank == world_size - 1:
            signal.raise_signal(signal.SIGKILL)
        for batch in step.batches():
            step.backward(means(model, batch["x"])["loss"])
        step.update()
        done = step.index + 1


def _rank(rank: int, world_size: int, file: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
    function(rank, world_size, *arguments)
    dist.destroy_process_group()


def train_group(folder: Path, job: Job, world_size: int, killed_in: Moment | None = None) -> list[int | None]:
    """Train on ranks until they end, and return their exit statuses."""
    file = folder / f"ranks-{len(list(folder.glob('ranks-*')))}"
    context = forks()
    arguments = ((rank, world_size, str(file), _train, (job, killed_in)) for rank in range(world_size))
    processes = [context.Process(target=_rank, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def outcome(job: Job) -> tuple[Any, ...]:
    """Return the steps of the checkpoints, the last step, the validations, and the weights of the best checkpoint."""
    store = Store(job.run_url)
    best = nn.Linear(1, 1)
    load_weights_of_best(best, store)
    ledger = read_ledger(store)
    end = last_event(ledger.events, EndEvent)
    assert end is not None
    validated = {event.step: event.means for event in events_of(ledger.events, ValidationEvent)}
    kept = sorted(commit.step for commit in find_commits(store)[0])
    return kept, end.step, end.reason, len(ledger.steps), validated, [each.tolist() for each in best.parameters()]


def load_weights_of_best(model: nn.Module, store: Store) -> None:
    store.write("job.json", b'{"spec": {"checkpoint": {"keep_best": {"metric": "height", "mode": "max"}}}}')
    assert load_weights(model, store.url, "best") == BEST


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("alone")
    job = job_in(folder)
    assert train_group(folder, job, 1) == [0]
    found = outcome(job)
    assert found[:2] == ([BEST, END], END)
    assert found[2].startswith("height has not improved in the last 3 validations, and its best value is ")
    assert found[3] == END < 30
    return found


def test_two_workers_stop_at_the_same_step_with_the_same_best_weights(
    tmp_path: Path, reference: tuple[Any, ...]
) -> None:
    job = job_in(tmp_path)
    assert train_group(tmp_path, job, 2) == [0, 0]
    assert outcome(job) == reference


@pytest.mark.parametrize("killed_in", ["the validation", "the checkpoint", "the step after it"])
@pytest.mark.parametrize("then", [1, *at_night([2])])
def test_a_sigkill_changes_neither_the_best_checkpoint_nor_the_last_step(
    tmp_path: Path, reference: tuple[Any, ...], killed_in: Moment, then: int
) -> None:
    job = job_in(tmp_path)
    assert train_group(tmp_path, job, 2, killed_in)[1] == -signal.SIGKILL
    assert train_group(tmp_path, job, then) == [0] * then
    assert outcome(job) == reference


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("failures", [2, 1000])
def test_the_best_checkpoint_is_written_again_if_the_storage_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: tuple[Any, ...], failures: int
) -> None:
    write, left = checkpoint.write_share, [StorageError("the disk is full")] * failures

    def failing(store: Store, folder: str, *arguments: Any) -> Any:
        if checkpoint.step_of(folder) == BEST and left:
            raise left.pop()
        return write(store, folder, *arguments)

    monkeypatch.setattr(checkpoint, "write_share", failing)
    monkeypatch.setattr(saver, "BEST_PAUSES_S", [0.0] * 3)
    job = job_in(tmp_path)
    _train(0, 1, job)
    if failures == 2:
        assert outcome(job) == reference
        return
    assert read_ledger(Store(job.run_url)).steps.num_rows == END, "the training goes on"
    with pytest.raises(
        CheckpointError, match=r"is that of step 8, whose checkpoint could not be written \(it has 14\); use"
    ):
        load_weights_of_best(nn.Linear(1, 1), Store(job.run_url))


@pytest.mark.usefixtures("process_group")
def test_a_best_checkpoint_at_the_end_that_cannot_be_written_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> Any:
        raise StorageError("the disk is full")

    monkeypatch.setattr(checkpoint, "write_share", failing)
    monkeypatch.setattr(saver, "BEST_PAUSES_S", ())
    monkeypatch.setattr(boundary, "LAST_PAUSES_S", (0.0,))
    job = replace(job_in(tmp_path), stop=StopSpec(patience=1, metric="loss", mode="max"))
    keep_best = GoalSpec("loss", "min")
    with pytest.raises(RunError, match="the last checkpoint of the run could not be written: the disk is full"):
        _train(0, 1, replace(job, checkpoint=replace(job.checkpoint, keep_best=keep_best)))


@pytest.mark.usefixtures("process_group")
def test_a_group_that_leaves_at_the_best_step_has_the_next_one_save_it(
    tmp_path: Path, reference: tuple[Any, ...]
) -> None:
    job, worker, starts = job_in(tmp_path), WorkerState(), []
    for _ in range(2):
        run, model = start(job, 0, 1, worker)
        with suppress(LeaveGroup):
            for step in run.steps(validate=lambda batch, model=model: means(model, batch["x"])):
                starts.append(step.index)
                for batch in step.batches():
                    step.backward(means(model, batch["x"])["loss"])
                if step.index == BEST - 1:
                    worker.request = Request(leaves=True)
                step.update()
        run.hand_over()
        worker.request = Request()
    assert starts == [*range(END)]
    assert outcome(job) == reference


def test_a_finished_run_that_stopped_early_is_finished_until_it_may_go_on(
    tmp_path: Path, reference: tuple[Any, ...]
) -> None:
    job = job_in(tmp_path)
    assert train_group(tmp_path, job, 1) == [0]
    newest = find_commits(Store(job.run_url))[0][0]
    assert newest.step == END
    assert newest.results.reason_to_stop(job.stop)
    assert train_group(tmp_path, job, 1) == [0]
    assert outcome(job) == reference
    longer = replace(job, stop=replace(job.stop, patience=4))
    assert train_group(tmp_path, longer, 1) == [0]
    assert outcome(longer)[:2] == ([BEST, END + 2], END + 2)


@pytest.mark.usefixtures("process_group")
def test_goals_that_no_validation_can_decide_are_refused(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    run, model = start(job, 0, 1)
    with pytest.raises(
        UsageError, match=r"stop needs validations, but run\.steps\(\) got no function; pass validate= to it"
    ):
        next(run.steps())
    run, model = start(replace(job, checkpoint=CheckpointSpec()), 0, 1)
    with pytest.raises(
        UsageError, match=r"stop has metric 'height', but the validation function returns \['loss'\]; set"
    ):
        next(run.steps(validate=lambda batch: means(model, batch["x"])["loss"]))


@pytest.mark.usefixtures("process_group")
def test_without_keep_best_the_best_weights_are_those_of_the_lowest_loss_if_they_were_kept(tmp_path: Path) -> None:
    plan = numbers_job(tmp_path).plan
    job = replace(job_in(tmp_path), stop=None, checkpoint=CheckpointSpec(every_steps=2, keep=1), plan=plan)

    def train(url: Path, sign: int) -> str:
        """Train 4 steps, with a validation loss that falls or rises, and return the run directory."""
        run, model = start(replace(job, run_url=str(url)), 0, 1)
        for step in run.steps(validate=lambda batch: sign * means(model, batch["x"])["loss"]):
            for batch in step.batches():
                step.backward(means(model, batch["x"])["loss"])
            step.update()
        return str(url)

    assert load_weights(nn.Linear(1, 1), train(tmp_path / "falling", 1), "best") == 4
    rising = Store(train(tmp_path / "rising", -1))
    with pytest.raises(
        CheckpointError, match=r"by loss \(min\) is that of step 2, whose checkpoint was not kept \(it h"
    ):
        export_weights(rising, Store(str(tmp_path / "out")), "best")
