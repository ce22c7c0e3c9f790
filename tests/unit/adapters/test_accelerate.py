"""Tests of the stand-in for Accelerate's Accelerator: equality with Accelerate itself, any world size, interruptions, and refusals."""

import difflib
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from alone import train_alone
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from undula.adapters import accelerate_loaders
from undula.adapters.accelerate import Accelerator
from undula.adapters.script import Script
from undula.config.job import load_spec
from undula.data.loader_processes import Loader
from undula.driver.launch import record_job
from undula.driver.preflight import check_job, examine
from undula.errors import SpecError, UndulaError, UsageError
from undula.parallel.layout import join_layout
from undula.plan.plan import Plan
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state.events import CheckpointEvent, LogEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store, open_store
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import local_world

FOLDER = Path(__file__).parents[2] / "migration"
BEFORE, AFTER = FOLDER / "accelerate_before.py", FOLDER / "accelerate_after.py"
MOST_CHANGED_LINES = 5


def test_a_script_changes_in_few_lines() -> None:
    lines = [file.read_text().splitlines() for file in (BEFORE, AFTER)]
    changes = [line for line in difflib.ndiff(*lines) if line.startswith(("- ", "+ "))]
    assert len([line for line in changes if line.startswith("+ ")]) <= MOST_CHANGED_LINES
    assert len([line for line in changes if line.startswith("- ")]) <= MOST_CHANGED_LINES


def train_after(folder: Path, name: str, *overrides: str, world_size: int = 1, arguments: str = "") -> Store:
    output = folder / name
    output.mkdir()
    command = [f"config.arguments=--output_dir {output} {arguments}", f"runs={folder}/runs", f"name={name}", *overrides]
    return train_alone([sys.executable, str(AFTER), *command], world_size)


def results_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def with_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], list[float]]]:
    """Function that trains with Accelerate itself, on the CPU of this process, and returns the loss of each batch."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState

    losses: list[float] = []
    backward = accelerate.Accelerator.backward
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(
        accelerate.Accelerator,
        "backward",
        lambda self, loss: (losses.append(loss.item()), backward(self, loss))[1],
    )

    def train(output: Path) -> list[float]:
        monkeypatch.setattr(sys, "argv", [str(BEFORE), "--output_dir", str(output)])
        runpy.run_path(str(BEFORE), run_name="__main__")
        return losses

    yield train
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_losses_and_results_are_those_of_accelerate(
    tmp_path: Path, with_accelerate: Callable[[Path], list[float]]
) -> None:
    (tmp_path / "theirs").mkdir()
    batches = with_accelerate(tmp_path / "theirs")
    theirs = [(one + other) / 2 for one, other in zip(batches[::2], batches[1::2], strict=True)]
    store = train_after(tmp_path, "ours", "plan.virtual_workers=1", "workers.max=1")
    ledger = read_ledger(store)
    assert ledger.steps["loss"].to_pylist() == pytest.approx(theirs, abs=1e-6)
    assert len(theirs) == 36
    expected, found = results_in(tmp_path / "theirs"), results_in(tmp_path / "ours")
    assert len(found) == 3
    for here, there in zip(found, expected, strict=True):
        assert here["accuracy"] == there["accuracy"]
        assert here["labels"] == there["labels"]
        assert torch.allclose(torch.tensor(here["logits"]), torch.tensor(there["logits"]), rtol=0, atol=1e-6)
    logged = events_of(ledger.events, LogEvent)
    assert [(each.step, each.values["epoch"]) for each in logged] == [(12, 0.0), (24, 1.0), (36, 2.0)]
    assert [each.values["accuracy"] for each in logged] == [each["accuracy"] for each in found]


def test_a_script_trains_the_same_at_any_world_size(tmp_path: Path) -> None:
    found = []
    for world_size in (1, 2):
        name = f"ranks{world_size}"
        settings = ("plan.virtual_workers=2", "deterministic=true")
        store = train_after(
            tmp_path, name, *settings, world_size=world_size, arguments="--shuffle --dropout 0.1 --epochs 2"
        )
        steps = read_ledger(store).steps
        columns = [steps[column].to_pylist() for column in ("loss", "lr", "grad_norm", "weights_digest")]
        found.append((columns, results_in(tmp_path / name)))
    assert found[0] == found[1]
    (_, rates, _, _), results = found[0]
    assert rates[:2] == pytest.approx([0.01 * 1 / 5, 0.01 * 3 / 5 * (1 - 2 / 24)]), "as with two processes"
    assert len(results[0]["labels"]) == 17


class Loop:
    """Loop of a small script, whose parts tests replace."""

    def __init__(self, **arguments: Any):
        self.arguments = arguments

    def __call__(self) -> None:
        accelerator = Accelerator(**self.arguments)
        torch.manual_seed(3)
        model = nn.Linear(2, 1)
        optimizer = self.optimizer(model)
        prepared = accelerator.prepare(self.loader(), model, optimizer, self.evaluation(), *self.more(optimizer))
        loader, model, optimizer, evaluation, *scheduler = prepared
        self.before(accelerator)
        for epoch in accelerator.epochs(2):
            for (x,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).square().mean())
                    self.in_step(accelerator, model)
                    optimizer.step()
                    for each in scheduler:
                        each.step()
                    optimizer.zero_grad()
            self.after_epoch(accelerator, model, evaluation, epoch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(24.0).reshape(12, 2) / 24), batch_size=2)

    def evaluation(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(10.0).reshape(5, 2)), batch_size=2)

    def more(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        return []

    def before(self, accelerator: Any) -> None:
        pass

    def in_step(self, accelerator: Any, model: nn.Module) -> None:
        pass

    def after_epoch(self, accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> None:
        pass


def prepared_job(loop: Callable[[], None], folder: Path, *overrides: str) -> tuple[Script, Job]:
    """Return a script as the driver has checked it, and its job, with two virtual workers."""
    script = Script(loop)
    (folder / "job.yaml").write_text("{name: loop, plan: {virtual_workers: 2}}")
    loaded = load_spec(folder / "job.yaml", [f"runs={folder}/runs", *overrides], settings=script.settings)
    examined = examine(script, loaded, check_job(loaded))
    job = record_job(loaded, examined.plan, open_store(loaded.spec.run_url), examined.script_data).job
    return Script(loop), job


def train_once(script: Script, job: Job, worker: WorkerState | None = None) -> None:
    """Train in a group of one rank, which can end early and leave its state in the worker."""
    worker = worker or WorkerState()
    with local_world(torch.device("cpu")):
        worker.join_group()
        run = Run(job, join_layout(0, 1, torch.device("cpu")), worker, lambda message: None)
        try:
            script(run)
        except (OSError, LeaveGroup):
            run.hand_over()
        finally:
            run.free()


@dataclass
class Counter:
    """State of a script with the methods that Accelerate asks for."""

    count: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@dataclass
class Interrupted(Loop):
    """Script whose group ends in the work after some epoch, or at the boundary after a step."""

    worker: WorkerState = field(default_factory=lambda: WorkerState(is_run=True, controller=object()))
    fails_after: int | None = None
    leaves_after: int | None = None
    done: list[tuple[int, int]] = field(default_factory=list)
    """Epochs after which the script has worked, and what its counter said."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def before(self, accelerator: Any) -> None:
        self.counter = Counter()
        accelerator.register_for_checkpointing(self.counter)
        self.steps = 0

    def in_step(self, accelerator: Any, model: nn.Module) -> None:
        if accelerator.sync_gradients:
            self.worker.request = Request(leaves=self.steps == self.leaves_after)
            self.steps += 1
            self.counter.count += 1

    def after_epoch(self, accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> None:
        if epoch == self.fails_after:
            raise OSError("another rank is lost")
        self.done.append((epoch, self.counter.count))


def test_work_after_an_epoch_is_done_once(tmp_path: Path) -> None:
    loop = Interrupted()
    script, job = prepared_job(loop, tmp_path, "checkpoint.every_steps=1000")
    assert job.plan.global_batch == 4
    loop.leaves_after = 1
    train_once(script, job, loop.worker)
    assert loop.done == []
    loop.leaves_after, loop.fails_after = None, 0
    train_once(script, job, loop.worker)  # step 2 ends the epoch, and the work after it fails
    assert loop.done == []
    loop.fails_after = 1
    train_once(script, job, loop.worker)
    assert loop.done == [(0, 3)]
    loop.fails_after = None
    train_once(script, job, loop.worker)  # all steps are done, but not the work after the last epoch
    assert loop.done == [(0, 3), (1, 6)]
    assert read_ledger(open_store(job.run_url)).steps["step"].to_pylist() == list(range(6))


class Saving(Loop):
    """Script that saves weights after each epoch, and asks for a checkpoint after the first one."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def after_epoch(self, accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> None:
        accelerator.save_model(accelerator.unwrap_model(model), self.folder / str(epoch))
        if epoch == 0:
            accelerator.save_state()
        assert all(
            each.equal(safetensors.torch.load_file(self.folder / str(epoch) / "model.safetensors")[name])
            for name, each in model.state_dict().items()
        )


def test_a_script_saves_weights_and_asks_for_checkpoints(tmp_path: Path) -> None:
    script, job = prepared_job(Saving(tmp_path), tmp_path, "checkpoint.every_steps=1000")
    train_once(script, job)
    events = events_of(read_ledger(open_store(job.run_url)).events, CheckpointEvent)
    assert [event.step for event in events] == [4, 6]
    weights = [safetensors.torch.load_file(tmp_path / each / "model.safetensors")["weight"] for each in ("0", "1")]
    assert not weights[0].equal(weights[1])


class Evaluating(Loop):
    """Script that gathers what it evaluates in several ways."""

    def after_epoch(self, accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> None:
        rows, means, names = [], [], []
        for (x,) in evaluation:
            rows.append(accelerator.gather_for_metrics({"x": x})["x"])
            means.append(accelerator.gather_for_metrics(x.mean()))
            names += accelerator.gather_for_metrics([f"{int(each[0])}" for each in x])
        assert torch.cat(rows).equal(torch.arange(10.0).reshape(5, 2))
        assert torch.cat(means).tolist() == [1.5, 5.5, 8.5]
        assert names == ["0", "2", "4", "6", "8"]
        assert accelerator.reduce(torch.tensor(2.0)) == 2
        assert accelerator.gather(torch.ones(2)).shape == (2,)
        assert accelerator.pad_across_processes(torch.ones(2, 3), dim=1).shape == (2, 3)


def test_what_is_gathered_is_in_the_order_of_the_dataset(tmp_path: Path) -> None:
    train_once(*prepared_job(Evaluating(), tmp_path))


class Clearing(Loop):
    """Script that frees gradients by the model's own zero_grad, or not at all."""

    clears = True

    def in_step(self, accelerator: Any, model: nn.Module) -> None:
        if self.clears:
            model.zero_grad()

    def after_epoch(self, accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> None:
        model(torch.ones(1, 2)).sum().backward()  # of the script itself, which is no part of the next step


def test_zero_grad_of_a_model_deletes_no_gradient_of_a_step(tmp_path: Path) -> None:
    found = []
    clearing = Clearing()
    clearing.clears = False
    for loop in (Clearing(), clearing, Loop()):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        script, job = prepared_job(loop, folder)
        train_once(script, job)
        found.append(read_ledger(open_store(job.run_url)).steps["loss"].to_pylist())
    assert found[0] == found[1] == found[2]


class PreparesLate(Loop):
    """Script that prepares another dataset in each epoch, with a loader process."""

    def after_epoch(self, accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> None:
        late = accelerator.prepare(DataLoader(TensorDataset(torch.full((3, 2), float(epoch))), 2, num_workers=1))
        found = [accelerator.gather_for_metrics(x) for (x,) in late]
        assert torch.cat(found).equal(torch.full((3, 2), float(epoch)))


def test_a_loader_that_is_prepared_in_an_epoch_has_its_own_dataset_and_leaves_no_process(tmp_path: Path) -> None:
    worker = WorkerState()
    made: list[Loader] = []
    script, job = prepared_job(PreparesLate(), tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate_loaders, "Loader", lambda workers: made.append(Loader(workers)) or made[-1])
        train_once(script, job, worker)
    assert len(made) == 2
    assert not any(loader._context.started() for loader in made)
    assert not [name for name in worker.kept if "evaluation" in name]


class LogsAfter(Loop):
    """Script that logs for each batch after the step of the optimizer."""

    def __call__(self) -> None:
        accelerator = Accelerator()
        model = nn.Linear(2, 1)
        loader, model, optimizer = accelerator.prepare(self.loader(), model, self.optimizer(model))
        for _ in accelerator.epochs(1):
            for (x,) in loader:
                accelerator.backward(model(x).mean())
                accelerator.log({"before": float(x.mean())})
                optimizer.step()
                accelerator.log({"after": float(x.mean())})
            accelerator.log({"epoch": 1})


def test_what_is_logged_after_the_optimizers_step_is_one_event(tmp_path: Path) -> None:
    script, job = prepared_job(LogsAfter(), tmp_path)
    train_once(script, job)
    ledger = read_ledger(open_store(job.run_url))
    means = [float(rows.mean()) for rows in torch.arange(24.0).reshape(3, 8) / 24]
    assert [json.loads(each) for each in ledger.steps["logged"].to_pylist()] == [
        {"before": pytest.approx(mean)} for mean in means
    ]
    events = [(each.step, each.values) for each in events_of(ledger.events, LogEvent)]
    assert events[:3] == [(step, {"after": pytest.approx(mean)}) for step, mean in enumerate(means, 1)]
    assert events[3:] == [(3, {"epoch": 1.0})]


@pytest.mark.parametrize(("rows", "batches", "steps"), [(20, 10, 3), (21, 8, 2), (17, 8, 2), (16, 8, 2)])
def test_the_length_of_a_loader_that_drops_is_that_of_the_plan(
    tmp_path: Path, rows: int, batches: int, steps: int
) -> None:
    lengths: list[int] = []

    class Drops(Loop):
        def loader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(rows, 2)), batch_size=2, drop_last=True)

        def before(self, accelerator: Any) -> None:
            lengths.append(len(accelerator._training))

    loop = Drops(gradient_accumulation_steps=4)
    _, job = prepared_job(loop, tmp_path, "plan.virtual_workers=1", "workers.max=1")
    assert (job.plan.global_batch, lengths[-1]) == (8, batches)
    assert Plan(job.plan, rows).steps_per_epoch == steps


class Autocasts(Loop):
    def in_step(self, accelerator: Any, model: nn.Module) -> None:
        assert accelerator.mixed_precision == "bf16"
        with accelerator.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_autocast_computes_in_the_precision_of_the_yaml(tmp_path: Path) -> None:
    train_once(*prepared_job(Autocasts(), tmp_path, "precision.compute=bf16"))


def changes_the_rate(accelerator: Any, *_: object) -> None:
    accelerator._optimizer.param_groups[0]["lr"] *= 0.5


def test_a_scheduler_that_prepare_did_not_get_is_refused(tmp_path: Path) -> None:
    loop = Loop()
    loop.optimizer = with_scheduler  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"^the optimizer has a scheduler that accelerator.prepare\(\) did not get"):
        prepared_job(loop, tmp_path)


def with_scheduler(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def changed(part: str, value: Callable[..., Any]) -> Loop:
    loop = Loop()
    setattr(loop, part, value)
    return loop


def gathers(accelerator: Any, *_: object) -> None:
    accelerator.gather(torch.ones(1))


def gathers_for_metrics(accelerator: Any, *_: object) -> None:
    accelerator.gather_for_metrics(torch.ones(1))


def iterates(accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> None:
    accelerator.backward(model(torch.ones(1, 2)).mean())


def clips_a_part(accelerator: Any, model: nn.Module) -> None:
    accelerator.clip_grad_norm_([model.weight], 1.0)


def per_epoch(optimizer: torch.optim.Optimizer) -> list[Any]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.step = lambda: None  # type: ignore[method-assign]
    return [scheduler]


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (changed("in_step", gathers), "accelerator.gather() was used in an open step, in which ranks"),
        (changed("after_epoch", gathers_for_metrics), "accelerator.gather_for_metrics() was called outside of the loop"),
        (changed("after_epoch", iterates), "accelerator.backward() was called outside of a step"),
        (changed("after_epoch", changes_the_rate), "the script changed the learning rate of parameter group 0 from 0.1 to 0.05"),
        (changed("in_step", clips_a_part), "accelerator.clip_grad_norm_() clips the Euclidean norm of all"),
        (changed("in_step", lambda accelerator, _: accelerator.log({"a": "b"})), "accelerator.log() got 'a' of type str"),
        (changed("in_step", lambda accelerator, _: accelerator.skip), "the Accelerator of undula.adapters.accelerate"),
    ],
)  # fmt: skip
def test_wrong_calls_in_the_loop_are_refused(tmp_path: Path, loop: Loop, sentence: str) -> None:
    script, job = prepared_job(loop, tmp_path)
    with pytest.raises((UsageError, AttributeError)) as caught:
        train_once(script, job)
    assert str(caught.value).startswith(sentence)


class Unfinished(Loop):
    """Script whose loop over batches lacks something."""

    def __init__(self, lacks: str):
        super().__init__()
        self.lacks = lacks

    def __call__(self) -> None:
        accelerator = Accelerator()
        model = nn.Linear(2, 1)
        optimizer = self.optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader, model, optimizer, scheduler = accelerator.prepare(self.loader(), model, optimizer, scheduler)
        for _ in accelerator.epochs(2):
            for (x,) in loader:
                accelerator.backward(model(x).mean())
                if self.lacks != "optimizer":
                    optimizer.step()
                if self.lacks != "scheduler":
                    scheduler.step()
                if self.lacks == "batches" and accelerator.sync_gradients:
                    break


@pytest.mark.parametrize(
    ("lacks", "sentence"),
    [
        ("optimizer", "step 0 ended without optimizer.step(); call it for each batch"),
        ("scheduler", "step 0 ended without scheduler.step(); call it after optimizer.step()"),
        ("batches", "the loop over the training DataLoader ended after step 0, before the end of epoch 0"),
    ],
)
def test_a_loop_that_is_not_complete_is_refused(tmp_path: Path, lacks: str, sentence: str) -> None:
    script, job = prepared_job(Unfinished(lacks), tmp_path)
    with pytest.raises(UsageError) as caught:
        train_once(script, job)
    assert str(caught.value).startswith(sentence)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(2)


ROWS = TensorDataset(torch.ones(12, 2))


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (Loop(mixed_precision="fp8"), "Accelerator got mixed_precision='fp8'; set it to one of 'no', 'fp16', 'bf16'"),
        (Loop(log_with="all"), "Accelerator does not take log_with=; remove it"),
        (Loop(cpu=True), "Accelerator does not take cpu=; remove it"),
        (Loop(step_scheduler_with_optimizer=False), "Accelerator does not take step_scheduler_with_optimizer=; leave"),
        (Loop(even=True), "Accelerator got even=, which it does not know"),
        (Loop(split_batches=True, cpu=False, project_dir=None), ""),
        (changed("loader", lambda: DataLoader(Endless(), batch_size=2)), "accelerator.prepare() got a DataLoader of an It"),
        (changed("loader", lambda: DataLoader(ROWS, sampler=WeightedRandomSampler([1] * 12, 12))), "accelerator.prepare() got"),
        (changed("loader", lambda: DataLoader(ROWS, batch_size=None)), "accelerator.prepare() got a DataLoader with a batch"),
        (changed("evaluation", lambda: DataLoader(ROWS, shuffle=True)), "accelerator.prepare() got a DataLoader for evaluation"),
        (changed("evaluation", lambda: nn.Linear(1, 1)), "accelerator.prepare() got a second model; combine"),
        (changed("loader", lambda: "none"), "accelerator.epochs() was called before accelerator.prepare() got a training"),
        (changed("more", lambda optimizer: [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]), "accelerator.prepare() got a Red"),
        (changed("before", lambda accelerator: accelerator.load_state("a")), "accelerator.load_state is not possible in a run; remove"),
    ],
)  # fmt: skip
def test_what_a_run_cannot_do_is_refused_in_the_driver(tmp_path: Path, loop: Loop, sentence: str) -> None:
    if not sentence:
        _, job = prepared_job(loop, tmp_path)
        assert (job.plan.global_batch, job.plan.micro_batch) == (2, 1)
        return
    if "a training" in sentence:
        loop.evaluation = lambda: "none"  # type: ignore[method-assign]
    with pytest.raises(UndulaError) as caught:
        prepared_job(loop, tmp_path)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_settings_follow_from_the_script_and_contradictions_are_refused(tmp_path: Path) -> None:
    loop = Loop(gradient_accumulation_steps=3, mixed_precision="no")
    loop.loader = lambda: DataLoader(ROWS, batch_size=2, shuffle=True, drop_last=True)  # type: ignore[method-assign]
    _, job = prepared_job(loop, tmp_path)
    plan = job.plan
    assert (plan.global_batch, plan.micro_batch, plan.shuffle, plan.last_step) == (12, 2, "window", "drop")
    assert (plan.epochs, job.schedule.base_lr, job.schedule.decay) == (2, 0.1, "constant")
    with pytest.raises(
        SpecError, match=r"plan.global_batch is 64, but the training DataLoader of the script makes it 12"
    ):
        prepared_job(loop, tmp_path, "plan.global_batch=64")
