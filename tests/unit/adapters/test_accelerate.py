"""Tests of the stand-in for Accelerate's Accelerator: equality with Accelerate itself, any world size, and interruptions."""

import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate_kit import ROWS, Loop, changed, job_of, train
from adapters_kit import job_of_script, store_of, train_group
from alone import train_alone
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from undula.adapters.accelerate import Accelerator, loaders
from undula.data.script.loader_processes import Loader
from undula.errors import SpecError, UsageError
from undula.plan.plan import Plan
from undula.recovery.worker_state import Request, WorkerState
from undula.state.events import CheckpointEvent, EndEvent, LogEvent
from undula.state.ledger import events_of, last_event, read_ledger
from undula.storage import Store

FOLDER = Path(__file__).parents[2] / "migration"

BEFORE, AFTER = FOLDER / "accelerate_before.py", FOLDER / "accelerate_after.py"


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
        AcceleratorState._reset_state(reset_partial_state=True)  # other tests leave one in this process
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


@pytest.mark.parametrize("stage", [0, 3])
def test_a_script_trains_the_same_at_any_world_size(tmp_path: Path, stage: int) -> None:
    """With a sharded model, for which the optimizer gets other parameters than the script has given it, as with a whole one."""
    found = []
    for world_size in (1, 2):
        name = f"ranks{world_size}"
        sharding = f"sharding.stage={stage if world_size == 2 else 0}"
        settings = ("plan.virtual_workers=2", "deterministic=true", sharding)
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


MADE_BEFORE = """
import sys
import torch
from torch import nn
from undula.adapters.accelerate import Accelerator, launch

def main():
    accelerator = Accelerator()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    if sys.argv[1] == "adagrad":
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer.step(lambda: model(torch.ones(5, 2)).square().mean().backward())
        optimizer.zero_grad()
    data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
    for epoch in accelerator.epochs(2):
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

if __name__ == "__main__":
    launch(main)
"""


@pytest.mark.parametrize("kind", ["adagrad", "stepped"])
def test_state_that_an_optimizer_has_before_it_is_prepared_is_sharded_as_its_parameters_are(
    tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "made.py"
    script.write_text(MADE_BEFORE)
    script.with_suffix(".yaml").write_text("plan: {virtual_workers: 2}\nschedule: {decay: constant}")
    found = []
    for stage, world_size in ((0, 1), (3, 1), (3, 2)):
        name = f"stage{stage}ranks{world_size}"
        settings = (f"config.arguments={kind}", f"sharding.stage={stage}", f"runs={tmp_path}", f"name={name}")
        steps = read_ledger(train_alone([sys.executable, str(script), *settings], world_size)).steps
        found.append([steps[column].to_pylist() for column in ("loss", "weights_digest")])
    assert found[0] == found[1] == found[2]


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
    job = job_of(loop, tmp_path, "checkpoint.every_steps=1000")
    assert job.plan.global_batch == 4
    loop.leaves_after = 1
    train_group(loop, job, loop.worker)
    assert loop.done == []
    loop.leaves_after, loop.fails_after = None, 0
    train_group(loop, job, loop.worker)  # step 2 ends the epoch, and the work after it fails
    assert loop.done == []
    loop.fails_after = 1
    train_group(loop, job, loop.worker)
    assert loop.done == [(0, 3)]
    loop.fails_after = None
    train_group(loop, job, loop.worker)  # all steps are done, but not the work after the last epoch
    assert loop.done == [(0, 3), (1, 6)]
    assert read_ledger(store_of(job)).steps["step"].to_pylist() == list(range(6))


class KeepsMean(nn.Module):
    """Layer that puts another tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.5 + x.detach().mean(dim=0)
        return x + self.mean


class UsesItsLoop(Interrupted):
    """Script whose work after an epoch uses what its loop over batches has left, and whose model keeps statistics of batches."""

    def __call__(self) -> None:
        accelerator = Accelerator()
        torch.manual_seed(3)
        model = nn.Sequential(KeepsMean(), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1))
        loader, model, optimizer = accelerator.prepare(self.loader(), model, self.optimizer(model))
        self.before(accelerator)
        for epoch in accelerator.epochs(2):
            total = 0
            for (x,) in loader:
                loss = model(x).square().mean()
                total += loss.detach()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                self.in_step(accelerator, model)
                optimizer.step()
                accelerator.log({"loss": loss})
            self.after_epoch(accelerator, model, None, epoch)
            accelerator.log({"total": total.item() / len(loader), "loss": loss.item()})


def test_work_after_an_epoch_has_the_variables_of_its_loop_when_it_is_repeated(tmp_path: Path) -> None:
    def digests(name: str, fails_after: int | None) -> list[Any]:
        (tmp_path / name).mkdir()
        loop = UsesItsLoop(fails_after=fails_after)
        job = job_of(loop, tmp_path / name)
        train_group(loop, job, loop.worker)
        loop.fails_after = None
        train_group(loop, job, loop.worker)
        assert loop.done == [(0, 3), (1, 6)]
        steps = read_ledger(store_of(job)).steps
        return [steps[column].to_pylist() for column in ("step", "loss", "weights_digest")]

    assert digests("first", 0) == digests("last", 1) == digests("none", None)


@pytest.mark.parametrize(("stops_after", "steps"), [(0, 3), (1, 6)])
def test_a_script_that_leaves_the_loop_over_epochs_ends_the_run(tmp_path: Path, stops_after: int, steps: int) -> None:
    def triggers(accelerator: Any, model: nn.Module, evaluation: Any, epoch: int) -> bool:
        if epoch == stops_after:
            accelerator.set_trigger()
        return bool(accelerator.check_trigger())

    ledger = train(changed("after_epoch", triggers), tmp_path)
    assert ledger.steps["step"].to_pylist() == list(range(steps))
    end = last_event(ledger.events, EndEvent)
    assert end is not None
    assert end.reason == ("the script left its loop over epochs" if stops_after == 0 else "")


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
    ledger = train(Saving(tmp_path), tmp_path, "checkpoint.every_steps=1000")
    events = events_of(ledger.events, CheckpointEvent)
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
    train(Evaluating(), tmp_path)


class Clearing(Loop):
    """Script that frees gradients by the model's own zero_grad, or not at all."""

    clears = True

    def after_step(self, model: nn.Module) -> None:
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
        found.append(train(loop, folder).steps["loss"].to_pylist())
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
    job = job_of(PreparesLate(), tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "Loader", lambda workers: made.append(Loader(workers)) or made[-1])
        train_group(PreparesLate(), job, worker)
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
    ledger = train(LogsAfter(), tmp_path)
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
    job = job_of_script(loop, tmp_path, "workers.max=1")
    assert (job.plan.global_batch, lengths[-1]) == (8, batches)
    assert Plan(job.plan, rows).steps_per_epoch == steps


class Autocasts(Loop):
    def in_step(self, accelerator: Any, model: nn.Module) -> None:
        assert accelerator.mixed_precision == "bf16"
        with accelerator.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_autocast_computes_in_the_precision_of_the_yaml(tmp_path: Path) -> None:
    train(Autocasts(), tmp_path, "precision.compute=bf16")


@pytest.mark.parametrize(
    ("key", "fix"), [("argumets", "did you mean arguments?"), ("learning_rate", "known keys: arguments")]
)
def test_a_wrong_key_of_config_is_refused_before_the_script_runs(tmp_path: Path, key: str, fix: str) -> None:
    def never() -> None:
        raise AssertionError

    with pytest.raises(SpecError, match=rf"^command line: unknown key config\.{key}: {re.escape(fix)}$"):
        job_of(never, tmp_path, f"config.{key}=x")


def test_settings_follow_from_the_script_and_contradictions_are_refused(tmp_path: Path) -> None:
    loop = Loop(gradient_accumulation_steps=3, mixed_precision="no")
    loop.loader = lambda: DataLoader(ROWS, batch_size=2, shuffle=True, drop_last=True)  # type: ignore[method-assign]
    job = job_of(loop, tmp_path)
    plan = job.plan
    assert (plan.global_batch, plan.micro_batch, plan.shuffle, plan.last_step) == (12, 2, "window", "drop")
    assert (plan.epochs, job.schedule.base_lr, job.schedule.decay) == (2, 0.1, "constant")
    with pytest.raises(
        SpecError, match=r"plan.global_batch is 64, but the training DataLoader of the script makes it 12"
    ):
        job_of(loop, tmp_path, "plan.global_batch=64")


SCRIPT = """
import torch
from undula.adapters.accelerate import Accelerator
from accelerate_kit import Loop

def main():
    accelerator, model = Accelerator(), torch.nn.Linear(2, 1)
    loader, model, optimizer = accelerator.prepare(Loop().loader(), model, Loop().optimizer(model))
    for epoch in accelerator.epochs(2):
        batches(accelerator, model, loader)
        for x in ():
            break
        if epoch:
            break

def batches(accelerator, model, loader):
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            if DONE:
                break

def other(accelerator, model, loader):
    for (x,) in loader:
        model(x).backward()
        break
"""


def test_a_break_out_of_the_batches_is_refused_before_a_worker_starts_unless_the_yaml_has_the_number_of_steps(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(f"# -*- coding: latin-1 -*- \u00e9{SCRIPT}", encoding="latin-1")
    main = runpy.run_path(str(tmp_path / "script.py"))["main"]
    assert job_of(main, tmp_path, "plan.max_steps=2").plan.max_steps == 2
    with pytest.raises(UsageError, match=r"^script.py:21: this `break` leaves the loop over batches"):
        job_of(main, tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT.replace("accelerator.backward", "print"))
    job_of(main, tmp_path)


def test_a_smoke_test_ends_the_loop_over_epochs(tmp_path: Path) -> None:
    """Within an epoch, which has three steps."""
    job = replace(job_of(Loop(), tmp_path), ends_after=2)
    train_group(Loop(), job)
    ledger = read_ledger(store_of(job))
    assert ledger.steps["step"].to_pylist() == [0, 1]
    end = last_event(ledger.events, EndEvent)
    assert end is not None
    assert end.step == 2
