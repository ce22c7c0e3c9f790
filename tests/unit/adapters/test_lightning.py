"""Tests of LightningModules under the loop of a run: the losses and hooks of Lightning's own Trainer, exact resumes, and refusals."""

import sys
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from adapters_kit import changed_lines, job_of_script, store_of, train_here
from alone import train_alone
from lightning_pair import blocks, defined
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from undula.adapters.lightning import Trainer, fit
from undula.adapters.lightning.library import require_lightning
from undula.adapters.refusals import LIGHTNING_TRAINER
from undula.config.job import load_spec
from undula.driver.model_facts import script_facts
from undula.errors import SpecError, UsageError
from undula.state.events import EndEvent, ValidationEvent
from undula.state.ledger import Ledger, events_of, last_event, read_ledger
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


def test_a_script_changes_in_three_lines() -> None:
    before, after, _ = blocks()
    assert changed_lines(before.splitlines(), after.splitlines()) == (2, 3)


def test_the_number_of_ranks_changes_no_bit(tmp_path: Path) -> None:
    found = []
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        _, script, job = blocks()
        (folder / "digits.py").write_text(script)
        (folder / "digits.yaml").write_text(job)
        command = [sys.executable, str(folder / "digits.py"), "name=run", f"runs={folder}", "deterministic=true"]
        store = train_alone(command, world_size)
        ledger = read_ledger(store)
        means = [(event.step, event.loss, event.means) for event in events_of(ledger.events, ValidationEvent)]
        found.append((ledger.steps["loss"].to_pylist(), ledger.steps["weights_digest"].to_pylist(), means))
    assert found[0] == found[1]
    assert len(found[0][0]) == 24


class Tiny(pl.LightningModule):
    """Module whose loss depends on what its hooks have counted, so that a hook that is lost or repeated changes the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(3, 1)
        self.epochs = self.validations = 0
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        loss = self.net(x).square().mean()
        self.log_dict({"a": loss, "b": 2.0}, prog_bar=True, on_epoch=True, sync_dist=True)
        return {"loss": loss * (1 + self.epochs + 10 * self.validations), "x": x}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self.net(batch[0]).square().mean())
        return self.seen[-1]

    def on_validation_epoch_end(self) -> None:
        self.validations += 0 if self.trainer.sanity_checking else len(torch.stack(self.seen))
        self.seen.clear()

    def on_train_epoch_end(self) -> None:
        self.epochs += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = [self.epochs, self.validations]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.epochs, self.validations = checkpoint["counts"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "epoch"}}

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(36.0).reshape(12, 3) / 36), batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(3, 3)), batch_size=4)


def train_module(make: Callable[[], pl.LightningModule], folder: Path, *overrides: str, **more: Any) -> Ledger:
    """Train a module for two epochs of three steps, on one rank."""
    workers = more.pop("virtual_workers", 1)

    def main() -> None:
        Trainer(**{"max_epochs": 2, **more}).fit(make())

    job = train_here(main, folder, "validation.every_steps=2", *overrides, virtual_workers=workers)
    return read_ledger(store_of(job))


JOB = """
name: digits
plan: {shuffle: none, global_batch: 4, virtual_workers: 1, epochs: 2}
validation: {every_steps: 2}
workers: {max: 1}
"""
"""Job of a script of `undula.main`, whose YAML has the plan of Tiny."""


def examine_fit(module: Any, folder: Path, *overrides: str, **more: Any) -> None:
    """Run a script of `undula.main` in the driver."""
    (folder / "digits.yaml").write_text(JOB)
    script_facts(lambda run: fit(run, module, **more), load_spec(folder / "digits.yaml", overrides), None)


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


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({}, 3),
        ({"check_val_every_n_epoch": 2}, 6),
        ({"val_check_interval": 0.5}, 1),
        ({"val_check_interval": 4, "accumulate_grad_batches": 2}, 2),
    ],
)
def test_validations_are_as_often_as_in_lightning(tmp_path: Path, arguments: dict[str, Any], steps: int) -> None:
    job = job_of_script(lambda: Trainer(max_epochs=2, **arguments).fit(Tiny()), tmp_path)
    assert job.validation.every_steps == steps


WITHOUT_EFFECT = """
    accelerator devices num_nodes use_distributed_sampler benchmark inference_mode enable_checkpointing enable_progress_bar
    enable_model_summary enable_autolog_hparams num_sanity_val_steps log_every_n_steps limit_test_batches limit_predict_batches
    default_root_dir model_registry"""
"""Arguments of Lightning's Trainer whose effect a run has, or does not need, whatever their value is."""


def test_every_argument_of_lightnings_trainer_is_known_and_has_one_treatment() -> None:
    """An update of Lightning that adds one must decide what a run does with it."""
    own = [name for name in signature(Trainer).parameters if name != "others"]
    assert sorted([*own, *WITHOUT_EFFECT.split(), *LIGHTNING_TRAINER]) == sorted(signature(pl.Trainer).parameters)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"strategy": "ddp"}, "Trainer does not take strategy=; remove it; a model"),
        ({"limit_train_batches": 0.1}, "Trainer does not take limit_train_batches=; remove it; a run takes all"),
        ({"gpus": 2}, "Trainer got gpus=, which it does not know; remove it"),
        (
            {"precision": "64-true"},
            "Trainer got precision='64-true'; set it to one of '32-true', '32', 32, 'bf16-mixed'",
        ),
        ({"max_epochs": -1}, "Trainer got max_epochs=-1, which never ends"),
    ],
)
def test_arguments_of_lightnings_trainer_that_a_run_cannot_honour_are_refused(
    tmp_path: Path, arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        job_of_script(lambda: Trainer(**arguments).fit(Tiny()), tmp_path)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda trainer: trainer.fit(Tiny(), ckpt_path="last"),
            "Trainer.fit() does not take ckpt_path=; submit the job",
        ),
        (lambda trainer: trainer.test(Tiny()), "Trainer.test is not possible in a run; load the weights"),
    ],
)
def test_other_work_of_lightnings_trainer_is_refused(
    tmp_path: Path, call: Callable[[Any], None], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        job_of_script(lambda: call(Trainer(max_epochs=1)), tmp_path)
    assert str(caught.value).startswith(sentence)


class Mixed(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        self.log("is_bf16", float(outputs.dtype == torch.bfloat16))
        return outputs.square().mean()


def test_the_whole_training_step_computes_in_the_precision_of_the_job(tmp_path: Path) -> None:
    ledger = train_module(Mixed, tmp_path, "precision.compute=bf16")
    assert ledger.steps["logged"].to_pylist() == ['{"is_bf16": 1.0}'] * 6


def with_method(name: str, method: Callable[..., Any]) -> type[Tiny]:
    return type("Tiny", (Tiny,), {name: method})


class Manual(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.ones(3)])


def loader(**more: Any) -> Callable[[Any], Any]:
    return lambda self: DataLoader(TensorDataset(torch.ones(12, 3)), **{"batch_size": 4, **more})


def optimizers(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: make(torch.optim.SGD(self.parameters(), lr=0.01))


class Shuffling(Tiny):
    def train_dataloader(self) -> Any:
        dataset = TensorDataset(torch.ones(13, 3))
        return DataLoader(dataset, batch_size=2, shuffle=True, drop_last=True)


REFUSED: dict[str, tuple[type[Tiny], str]] = {
    "manual": (Manual, "Manual sets automatic_optimization=False, but a run calls backward"),
    "iter": (
        with_method("training_step", lambda self, dataloader_iter: None),
        "Tiny.training_step() takes dataloader_iter",
    ),
    "clipping": (
        with_method("configure_gradient_clipping", lambda self, optimizer: None),
        "Tiny overrides configure_gradient_clipping(), which a run does not call; set gradient.max_norm",
    ),
    "loaders": (
        with_method("train_dataloader", lambda self: [1, 2]),
        "train_dataloader() returned a list, but a run reads one",
    ),
    "sampler": (
        with_method("train_dataloader", loader(sampler=WeightedRandomSampler([1.0] * 12, 12))),
        "train_dataloader() returned a DataLoader with a WeightedRandomSampler; set shuffle= instead",
    ),
    "validation sampler": (
        with_method("val_dataloader", loader(sampler=WeightedRandomSampler([1.0] * 12, 12))),
        "val_dataloader() returned a DataLoader with a WeightedRandomSampler; set shuffle= instead",
    ),
    "collate": (
        with_method("val_dataloader", loader(collate_fn=list)),
        "the DataLoaders of train_dataloader() and val_dataloader() have different collate_fn=",
    ),
    "iterable": (
        with_method("train_dataloader", lambda self: DataLoader(Endless(), batch_size=4)),
        "train_dataloader() returned a DataLoader of an IterableDataset, whose samples have no index",
    ),
    "several": (
        with_method("configure_optimizers", optimizers(lambda optimizer: [optimizer, optimizer])),
        "configure_optimizers() returned 2 optimizers, but a run has one",
    ),
    "plateau": (
        with_method(
            "configure_optimizers",
            optimizers(
                lambda optimizer: {
                    "optimizer": optimizer,
                    "lr_scheduler": ReduceLROnPlateau(optimizer),
                    "monitor": "val_loss",
                }
            ),
        ),
        "configure_optimizers() returned a ReduceLROnPlateau, which needs a metric",
    ),
    "strategy": (
        with_method("setup", lambda self, stage: self.trainer.strategy.barrier()),
        "self.trainer.strategy.barrier was read, but a run has no strategy of Lightning",
    ),
    "attribute": (
        with_method("setup", lambda self, stage: self.trainer.log_dir),
        "self.trainer.log_dir was read, but Undula runs the module without Lightning's Trainer",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_run_does_not_support_is_refused_before_a_worker_starts(tmp_path: Path, kind: str) -> None:
    make, sentence = REFUSED[kind]
    with pytest.raises(UsageError) as caught:
        job_of_script(lambda: Trainer(max_epochs=1).fit(make()), tmp_path)
    assert str(caught.value).startswith(sentence)


MAKES = "the DataLoader of train_dataloader() makes "


@pytest.mark.parametrize(
    ("method", "value", "sentence"),
    [
        ("train_dataloader", loader(batch_size=3), f"{MAKES}plan.micro_batch 3, but the job has 4; set it in the job's YAML"),
        ("train_dataloader", loader(shuffle=True), f'{MAKES}plan.shuffle "window", but the job has "none"; set it'),
        ("train_dataloader", loader(batch_size=5, drop_last=True), f"{MAKES}plan.micro_batch 5, but"),
        ("train_dataloader", lambda self: DataLoader(TensorDataset(torch.ones(13, 3)), 4, drop_last=True), f'{MAKES}plan.last_step "drop"'),
        ("configure_optimizers", optimizers(lambda it: it), "the optimizer of configure_optimizers() makes schedule.base_lr 0.01"),
    ],
)  # fmt: skip
def test_fit_refuses_a_plan_of_the_yaml_that_the_script_contradicts(
    tmp_path: Path, method: str, value: Any, sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        examine_fit(with_method(method, value)(), tmp_path)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("callback", "sentence"),
    [
        (ModelCheckpoint, "fit() got the callback ModelCheckpoint, which a run does not take; set checkpoint.every_steps"),
        (lambda: EarlyStopping("val_loss"), "fit() got the callback EarlyStopping, which a run does not take; set stop in"),
    ],
)  # fmt: skip
def test_callbacks_are_answered_by_what_replaces_them(
    tmp_path: Path, callback: Callable[[], pl.Callback], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        examine_fit(Tiny(), tmp_path, callbacks=[callback()])
    assert str(caught.value).startswith(sentence)


def test_what_is_not_a_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^fit\(\) got a Linear, but it trains a LightningModule"):
        examine_fit(nn.Linear(1, 1), tmp_path)


def test_swapped_arguments_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^fit\(\) got a Tiny in place of the run; call fit\(run, module, datamodule\)"
    ):
        fit(Tiny(), Tiny())  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", ["", "failed with OSError"])
def test_lightnings_own_loop_in_a_train_function_is_answered_by_what_replaces_it(tmp_path: Path, failure: str) -> None:
    trainer = pl.Trainer(max_steps=0, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    (tmp_path / "digits.yaml").write_text(JOB)

    def train(run: Any) -> None:
        if failure:
            raise OSError
        trainer.fit(Tiny())

    sentence = rf"{failure}.*call undula.adapters.lightning.fit\(run, module, datamodule\) in place of the fit"
    with pytest.raises(SpecError, match=sentence):
        script_facts(train, load_spec(tmp_path / "digits.yaml"), None)


class NoLoss(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class LogsLate(Tiny):
    def on_train_epoch_end(self) -> None:
        self.log("late", 1.0)


class LogsSum(Tiny):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("sum", 1.0, reduce_fx="sum")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (NoLoss, "training_step() returned a NoneType without a loss"),
        (LogsLate, "self.log('late') was called in on_train_epoch_end(), which belongs to no batch"),
        (LogsSum, "self.log('sum') got reduce_fx='sum', but a run takes the mean over samples"),
    ],
)
def test_what_cannot_be_averaged_over_a_step_is_refused(tmp_path: Path, make: type[Tiny], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        train_module(make, tmp_path)
    assert str(caught.value).startswith(sentence)


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


class ClipsByTorch(Tiny):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def test_a_hook_that_changes_gradients_before_they_are_reduced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^clip_grad_norm_\(\) changed a gradient of an open step"):
        train_module(ClipsByTorch, tmp_path)


def seeded(make: type[Tiny]) -> Tiny:
    torch.manual_seed(5)
    return make()


class Unscheduled(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SetsRates(Unscheduled):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01 / (1 + self.global_step)


@pytest.mark.parametrize(("overrides", "last"), [((), 0.01), (("schedule.decay=cosine",), 0.001)])
def test_a_rate_without_a_scheduler_stays_unless_the_yaml_has_a_decay(
    tmp_path: Path, overrides: tuple[str, ...], last: float
) -> None:
    rates = train_module(Unscheduled, tmp_path, *overrides).steps["lr"].to_pylist()
    assert rates[-1] == pytest.approx(last)
    with pytest.raises(
        UsageError, match=r"^configure_optimizers\(\) returned no scheduler, .* set schedule.decay=constant"
    ):
        examine_fit(Unscheduled(), tmp_path, "schedule.base_lr=0.01")


def test_rates_that_a_module_sets_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^the script changed the learning rate of parameter group 0 from 0.01 to 0.005"
    ):
        train_module(SetsRates, tmp_path)


def test_a_missing_library_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(SpecError, match=r"^pytorch_lightning is not installed; run pip install 'undula\[lightning\]'$"):
        require_lightning()
