"""Tests of LightningModules under the loop of a run: the losses and hooks of Lightning's own Trainer, exact resumes, and refusals."""

import runpy
import sys
import threading
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from adapters_kit import job_of_script, store_of, train_group, train_here
from alone import train_alone
from lightning_kit import JOB, Tiny, blocks, defined, loader, optimizers, tiny, train_module
from pytorch_lightning.callbacks import LearningRateMonitor, ModelSummary
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from undula.adapters.lightning import Trainer, fit
from undula.adapters.lightning.hooks import Hooks
from undula.adapters.lightning.trainer import WITHOUT_EFFECT
from undula.adapters.refusals import LIGHTNING_TRAINER
from undula.data.script.items import Items
from undula.errors import SpecError, UsageError
from undula.recovery.worker_state import Request, WorkerState
from undula.state.events import EndEvent, ValidationEvent
from undula.state.ledger import events_of, last_event, read_ledger
from undula.testing import conformance

MODULE_HOOKS = (
    "prepare_data setup configure_model configure_optimizers on_fit_start on_train_start on_train_epoch_start on_train_batch_start "
    "on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer training_step on_before_zero_grad on_before_backward "
    "on_after_backward on_before_optimizer_step lr_scheduler_step on_train_batch_end on_validation_start on_validation_epoch_start "
    "on_validation_batch_start validation_step on_validation_batch_end on_validation_epoch_end on_validation_end on_train_epoch_end "
    "on_train_end on_fit_end teardown"
)
CALLBACK_HOOKS = (
    "setup on_fit_start on_sanity_check_start on_sanity_check_end on_train_start on_train_epoch_start on_train_batch_start "
    "on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step on_train_batch_end on_validation_start "
    "on_validation_epoch_start on_validation_batch_start on_validation_batch_end on_validation_epoch_end on_validation_end "
    "on_train_epoch_end on_train_end on_fit_end teardown"
)
SILENT = (
    "gradient_clip_val=0.5, accelerator='cpu', devices=1, num_sanity_val_steps=-1, logger=False, enable_checkpointing=False, "
    "enable_progress_bar=False, enable_model_summary=False, callbacks=CALLBACKS)"
)


def recording(base: type, hooks: list[str], calls: list[Any]) -> type:
    """Return a class whose hooks record that they were called, with the loss for a step."""

    def recorded(hook: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            calls.append((base.__name__, hook, *(each for each in arguments if isinstance(each, int))))
            found = getattr(super(derived, self), hook)(*arguments, **named)
            if hook == "training_step":
                calls.append(("loss", found.item()))
            return found

        return call

    derived = type(base.__name__, (base,), {hook: recorded(hook) for hook in hooks})
    return derived


def prepared(script: str, calls: list[Any], scheduler: str) -> dict[str, Any]:
    """Return what a script of the page defines, with equal weights at the beginning, and with recorded hooks."""
    names = defined(
        script.replace("shuffle=True", "shuffle=False")
        .replace("devices=2, ", "")
        .replace("gradient_clip_val=0.5)", SILENT)
    )

    class Classifier(names["Classifier"]):  # type: ignore[misc]
        def configure_model(self) -> None:
            with torch.device("cpu"):
                generator = torch.Generator().manual_seed(7)
                for parameter in self.parameters():
                    nn.init.normal_(parameter, std=0.3, generator=generator)

        def configure_optimizers(self) -> Any:
            found = super().configure_optimizers()
            assert self.trainer.estimated_stepping_batches == 48
            assert self.trainer.num_training_batches == 24
            each = LambdaLR(found[0][0], lambda step: 0.97**step)
            return found if scheduler == "epoch" else (found[0], [{"scheduler": each, "interval": "step"}])

    names["Classifier"] = recording(Classifier, MODULE_HOOKS.split(), calls)
    names["Digits"] = recording(names["Digits"], ["prepare_data", "setup", "teardown"], calls)
    names["CALLBACKS"] = [recording(pl.Callback, CALLBACK_HOOKS.split(), calls)()]
    return names


@pytest.mark.parametrize("scheduler", ["epoch", "step"])
def test_losses_and_hooks_are_those_of_lightnings_own_trainer(tmp_path: Path, scheduler: str) -> None:
    before, after, _ = blocks()
    theirs: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared(before, theirs, scheduler)["main"]()
    ours: list[Any] = []
    names = prepared(after, ours, scheduler)

    def main() -> None:
        ours.clear()  # the driver has run the script before
        names["main"]()

    store = store_of(train_here(main, tmp_path))
    hooks = [[call for call in calls if call[0] != "loss"] for calls in (theirs, ours)]
    assert hooks[0] == hooks[1]
    losses = [[call[1] for call in calls if call[0] == "loss"] for calls in (theirs, ours)]
    assert len(losses[0]) == 96
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    recorded = read_ledger(store).steps["loss"].to_pylist()
    assert recorded == pytest.approx([sum(losses[0][at : at + 2]) / 2 for at in range(0, 96, 2)], abs=1e-6)


def test_neither_the_number_of_ranks_nor_sharding_changes_a_bit(tmp_path: Path) -> None:
    found = []
    for world_size, stage in ((1, 0), (2, 0), (2, 3)):
        folder = tmp_path / f"{world_size}-{stage}"
        folder.mkdir()
        _, script, job = blocks()
        (folder / "digits.py").write_text(script)
        (folder / "digits.yaml").write_text(job)
        settings = ("name=run", f"runs={folder}", "deterministic=true", f"sharding.stage={stage}")
        command = [sys.executable, str(folder / "digits.py"), *settings]
        store = train_alone(command, world_size)
        ledger = read_ledger(store)
        means = [(event.step, event.loss, event.means) for event in events_of(ledger.events, ValidationEvent)]
        found.append((ledger.steps["loss"].to_pylist(), ledger.steps["weights_digest"].to_pylist(), means))
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) == 24


def test_a_run_of_a_module_with_state_of_its_own_resumes_exactly(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text(JOB)
    conformance.check(lambda run: fit(run, Tiny()), tmp_path / "digits.yaml", f"runs={tmp_path}")


def test_a_callback_can_end_the_run(tmp_path: Path) -> None:
    class Ends(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = float(trainer.callback_metrics["loss"]) > 0

    ledger = train_module(Tiny, tmp_path, callbacks=Ends())
    end = last_event(ledger.events, EndEvent)
    assert end is not None
    assert (end.step, end.reason) == (3, "the script set trainer.should_stop")
    assert '"a"' in ledger.steps["logged"].to_pylist()[0]


def test_settings_follow_from_the_script_and_contradictions_are_refused(tmp_path: Path) -> None:
    def main() -> None:
        Trainer(max_steps=7, accumulate_grad_batches=3, precision="bf16-mixed", deterministic=True, logger=False).fit(
            Shuffling()
        )

    job = job_of_script(main, tmp_path, virtual_workers=2)
    plan = job.plan
    assert (plan.global_batch, plan.micro_batch, plan.shuffle, plan.last_step) == (12, 2, "window", "drop")
    assert (plan.epochs, plan.max_steps, job.validation.every_steps) == (7, 7, 1)
    assert (job.schedule.base_lr, job.gradient.max_norm) == (0.01, None)
    assert (job.precision.compute, job.deterministic) == ("bf16", True)
    yaml = ("plan.epochs=9", "validation.every_steps=5", "gradient.max_norm=2.0")
    job = job_of_script(main, tmp_path, *yaml, virtual_workers=2)
    assert (job.plan.epochs, job.validation.every_steps, job.gradient.max_norm) == (9, 5, 2.0), (
        "the script says nothing"
    )
    sentence = r"plan.max_steps is 8, but Trainer\(max_steps=...\) of the script makes it 7; remove plan.max_steps, and set max_steps of"
    with pytest.raises(SpecError, match=sentence):
        job_of_script(main, tmp_path, "plan.max_steps=8", virtual_workers=2)


@pytest.mark.parametrize("norm", [None, 0, 0.0, -1.0])
def test_a_trainer_without_a_largest_norm_does_not_clip(tmp_path: Path, norm: float | None) -> None:
    job = job_of_script(lambda: Trainer(max_epochs=1, gradient_clip_val=norm).fit(Tiny()), tmp_path)
    assert job.gradient.max_norm is None


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({}, 3),
        ({"check_val_every_n_epoch": 2}, 6),
        ({"val_check_interval": 0.5}, 1),
        ({"val_check_interval": 1.0, "check_val_every_n_epoch": 2}, 6),
        ({"val_check_interval": 4, "accumulate_grad_batches": 2}, 2),
    ],
)
def test_validations_are_as_often_as_in_lightning(tmp_path: Path, arguments: dict[str, Any], steps: int) -> None:
    job = job_of_script(lambda: Trainer(max_epochs=2, **arguments).fit(Tiny()), tmp_path)
    assert job.validation.every_steps == steps


def test_every_argument_of_lightnings_trainer_is_known_and_has_one_treatment() -> None:
    """An update of Lightning that adds one must decide what a run does with it."""
    own = {name for name in signature(Trainer).parameters if name != "others"}
    treatments = (own, WITHOUT_EFFECT, LIGHTNING_TRAINER.keys())
    assert sum(map(len, treatments)) == len(set().union(*treatments))
    assert signature(pl.Trainer).parameters.keys() - set().union(*treatments) == set()


def test_an_argument_of_lightnings_trainer_that_undula_does_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("undula.adapters.lightning.trainer.WITHOUT_EFFECT", WITHOUT_EFFECT - {"benchmark"})
    Trainer(benchmark=None)
    with pytest.raises(
        UsageError, match=r"^Trainer does not take benchmark=; remove it, because Undula does not know it$"
    ):
        Trainer(benchmark=True)


class Mixed(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        self.log("is_bf16", float(outputs.dtype == torch.bfloat16))
        return outputs.square().mean()


def test_the_whole_training_step_computes_in_the_precision_of_the_job(tmp_path: Path) -> None:
    ledger = train_module(Mixed, tmp_path, "precision.compute=bf16")
    assert ledger.steps["logged"].to_pylist() == ['{"is_bf16": 1.0}'] * 6


class Shuffling(Tiny):
    def train_dataloader(self) -> Any:
        dataset = TensorDataset(torch.ones(13, 3))
        return DataLoader(dataset, batch_size=2, shuffle=True, drop_last=True)


class Clearing(Tiny):
    """Module that deletes gradients in the middle of an accumulation, which the step of two virtual workers must survive."""

    clears = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.clears:
            self.zero_grad()
            self.optimizers().zero_grad()


class NotClearing(Clearing):
    clears = False


def test_zero_grad_of_a_script_deletes_no_gradient_of_a_step(tmp_path: Path) -> None:
    found = []
    for make in (Clearing, NotClearing):
        folder = tmp_path / make.__name__
        folder.mkdir()
        with_batches = type(make.__name__, (make,), {"train_dataloader": loader(batch_size=2)})
        ledger = train_module(lambda make=with_batches: seeded(make), folder, virtual_workers=2)
        found.append(ledger.steps["loss"].to_pylist())
    assert found[0] == found[1]


def seeded(make: type[Tiny]) -> Tiny:
    torch.manual_seed(5)
    return make()


Unscheduled = tiny(configure_optimizers=optimizers(lambda optimizer: optimizer))


@pytest.mark.parametrize(("overrides", "last"), [((), 0.01), (("schedule.decay=cosine",), 0.001)])
def test_a_rate_without_a_scheduler_stays_unless_the_yaml_has_a_decay(
    tmp_path: Path, overrides: tuple[str, ...], last: float
) -> None:
    rates = train_module(Unscheduled, tmp_path, *overrides).steps["lr"].to_pylist()
    assert rates[-1] == pytest.approx(last)


def test_hooks_find_the_weights_in_a_checkpoint_and_cannot_take_them_out_of_the_runs(tmp_path: Path) -> None:
    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["global_step"] == self.trainer.global_step
        for name in [*checkpoint["state_dict"]]:
            del checkpoint["state_dict"][name]
        Tiny.on_save_checkpoint(self, checkpoint)

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()
        Tiny.on_load_checkpoint(self, checkpoint)

    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    module = tiny(on_save_checkpoint=on_save_checkpoint, on_load_checkpoint=on_load_checkpoint)
    conformance.check(lambda run: fit(run, module()), file, f"runs={tmp_path}")


def test_the_only_logged_loss_is_that_of_the_validation_and_displays_are_left_out(tmp_path: Path) -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        self.log("valid/MSE_loss", self.net(x).square().mean(), batch_size=len(x))
        self.log("valid/accuracy", 0.5)
        self.seen.append(torch.zeros(()))

    displays = [LearningRateMonitor(), ModelSummary()]
    ledger = train_module(tiny(validation_step=validation_step), tmp_path, callbacks=displays)
    assert all(
        event.loss == event.means["valid/MSE_loss"] != 0.5 for event in events_of(ledger.events, ValidationEvent)
    )


def test_a_collate_function_of_the_module_works_in_loader_processes(tmp_path: Path) -> None:
    def losses(num_workers: int) -> list[float]:
        def train_dataloader(self: Any) -> Any:
            data = TensorDataset(torch.arange(36.0).reshape(12, 3) / 36)
            return DataLoader(data, batch_size=4, collate_fn=self.collate, num_workers=num_workers)

        def collate(self: Any, samples: Any) -> Any:
            return (torch.stack([sample[0] for sample in samples]) * (1 + self.epochs),)

        def make() -> Any:
            torch.manual_seed(0)
            return tiny(train_dataloader=train_dataloader, collate=collate)()

        folder = tmp_path / str(num_workers)
        folder.mkdir()
        return train_module(make, folder).steps["loss"].to_pylist()

    assert losses(1) == losses(0)
    module = tiny()()
    hooks = Hooks(module, {"train_dataloader": None, "val_dataloader": None}, None, (), 1, 0, torch.device("cpu"))
    hooks.trainer.recorder.step = threading.Lock()  # type: ignore[assignment]  # a step holds process groups
    assert len(Items([0], module.training_step).dumps()) < 100_000


def test_validation_batches_are_collated_by_the_function_of_their_own_loader(tmp_path: Path) -> None:
    def mixed(samples: list[Any]) -> Any:
        return [torch.stack([sample[0] for sample in samples]) * 100]

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        assert batch[0].max() == 100
        return self.net(batch[0] / 100).square().mean()

    def validation_step(self: Any, batch: Any, batch_idx: int) -> Any:
        assert batch[0].max() == 1
        self.log("val_loss", batch[0].mean())
        self.seen.append(batch[0].mean())

    ledger = train_module(
        tiny(
            train_dataloader=loader(collate_fn=mixed),
            val_dataloader=loader(),
            training_step=training_step,
            validation_step=validation_step,
        ),
        tmp_path,
    )
    assert {event.loss for event in events_of(ledger.events, ValidationEvent)} == {1.0}


def test_a_module_and_its_data_see_the_place_and_the_metrics_that_they_would_see_in_lightning(tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {"setup": [], "loaded": [], "validated": [], "after": []}

    class Data(pl.LightningDataModule):
        def setup(self, stage: str) -> None:
            seen["setup"].append(self.trainer.world_size)  # type: ignore[union-attr]

        def train_dataloader(self) -> Any:
            return loader()(self)

        val_dataloader = train_dataloader

    class Module(tiny()):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", batch[0].mean())

        def on_validation_epoch_end(self) -> None:
            seen["validated"].append(float(self.trainer.callback_metrics["val_loss"]))

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen["loaded"].append((checkpoint["epoch"], checkpoint["global_step"]))

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            pass

    class Leaves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            worker.request = Request(leaves=trainer.global_step == 4)

    def main() -> None:
        trainer = Trainer(max_epochs=2, min_epochs=1, callbacks=[Leaves()])
        trainer.fit(Module(), datamodule=Data())
        seen["after"].append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    worker = WorkerState(is_run=True, controller=object())
    job = job_of_script(main, tmp_path, "validation.every_steps=2", virtual_workers=1)
    train_group(main, job, worker)
    assert (seen["loaded"], seen["after"]) == ([], [])
    train_group(main, job, worker)
    assert set(seen["setup"]) == {1}
    assert seen["loaded"] == [(1, 5)]
    assert set(seen["validated"]) == {1.0}
    assert seen["after"] == [(6, 1.0)]


AFTERWARDS = """
import torch
from lightning_kit import loader, tiny
from undula.adapters.lightning import Trainer

def main():
    trainer = Trainer(max_epochs=1)
    trainer.fit(tiny()(), loader()(None), loader()(None))
    print(trainer.callback_metrics, trainer.global_step)
    if torch.cuda.is_available():
        trainer.predict()
    trainer.CALL
"""


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("test()", "script.py:12: Trainer.test is not possible in a run; load the weights with undula.load_weights"),
        ("checkpoint_callback.best_model_path", "script.py:12: Trainer.checkpoint_callback is not possible in a run; set checkpoint.keep"),
        ("is_global_zero", ""),
    ],
)  # fmt: skip
def test_what_a_script_would_do_with_its_trainer_after_the_training_is_refused_before_it(
    tmp_path: Path, call: str, sentence: str
) -> None:
    (tmp_path / "script.py").write_text(AFTERWARDS.replace("CALL", call))
    main = runpy.run_path(str(tmp_path / "script.py"))["main"]
    if not sentence:
        train_here(main, tmp_path)
        return
    with pytest.raises(UsageError) as caught:
        job_of_script(main, tmp_path)
    assert str(caught.value).startswith(sentence)
