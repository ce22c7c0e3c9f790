"""Tests of LightningModules under the loop of a run: the losses and hooks of Lightning's own Trainer, exact resumes, and refusals."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from alone import train_alone
from lightning_pair import blocks, changed_lines, defined, load, train_here
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from undula.adapters.lightning import fit
from undula.adapters.lightning_library import require_lightning
from undula.driver.model_facts import script_facts
from undula.errors import SpecError, UsageError
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
ONE = ("plan.global_batch=16", "plan.virtual_workers=1", "validation.every_steps=12", "workers.max=1")
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
    names = prepared(after.replace("Digits())", "Digits(), callbacks=CALLBACKS)"), ours, scheduler)

    def train(run: Any) -> None:
        ours.clear()  # the driver has run the script before
        names["train"](run)

    store = train_here(train, load(tmp_path, *ONE, "plan.shuffle=none"))
    hooks = [[call for call in calls if call[0] != "loss"] for calls in (theirs, ours)]
    assert hooks[0] == hooks[1]
    losses = [[call[1] for call in calls if call[0] == "loss"] for calls in (theirs, ours)]
    assert len(losses[0]) == 96
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    recorded = read_ledger(store).steps["loss"].to_pylist()
    assert recorded == pytest.approx([sum(losses[0][at : at + 2]) / 2 for at in range(0, 96, 2)], abs=1e-6)


def test_a_script_changes_in_at_most_ten_lines() -> None:
    removed, added = changed_lines()
    assert (removed, added) == (4, 5)


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


JOB = (
    *("plan.shuffle=none", "plan.global_batch=4", "plan.virtual_workers=1", "plan.micro_batch=null", "plan.epochs=2"),
    *("validation.every_steps=2", "workers.max=1"),
)


def test_a_run_of_a_module_with_state_of_its_own_resumes_exactly(tmp_path: Path) -> None:
    load(tmp_path)
    conformance.check(lambda run: fit(run, Tiny()), tmp_path / "digits.yaml", *JOB)


def test_a_callback_can_end_the_run(tmp_path: Path) -> None:
    class Ends(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = float(trainer.callback_metrics["loss"]) > 0

    store = train_here(lambda run: fit(run, Tiny(), callbacks=[Ends()]), load(tmp_path, *JOB))
    end = last_event(read_ledger(store).events, EndEvent)
    assert end is not None
    assert (end.step, end.reason) == (3, "the script set trainer.should_stop")
    assert '"a"' in read_ledger(store).steps["logged"].to_pylist()[0]


class Mixed(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        self.log("is_bf16", float(outputs.dtype == torch.bfloat16))
        return outputs.square().mean()


def test_the_whole_training_step_computes_in_the_precision_of_the_job(tmp_path: Path) -> None:
    store = train_here(lambda run: fit(run, Mixed()), load(tmp_path, *JOB, "precision.compute=bf16"))
    assert read_ledger(store).steps["logged"].to_pylist() == ['{"is_bf16": 1.0}'] * 6


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
        "the DataLoader of train_dataloader() has a WeightedRandomSampler, but the plan decides",
    ),
    "iterable": (
        with_method("train_dataloader", lambda self: DataLoader(Endless(), batch_size=4)),
        "the DataLoader of train_dataloader() has an IterableDataset, whose samples have no index",
    ),
    "size": (
        with_method("train_dataloader", loader(batch_size=3)),
        "the DataLoader of train_dataloader() has batch_size=3, but the plan has micro-batches of 4 samples",
    ),
    "shuffle": (
        with_method("train_dataloader", loader(shuffle=True)),
        "the DataLoader of train_dataloader() has shuffle=True, but plan.shuffle is none; set plan.shuffle=window",
    ),
    "drop": (
        with_method("train_dataloader", loader(drop_last=True)),
        "the DataLoader of train_dataloader() has drop_last=True",
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
    "rate": (
        with_method("configure_optimizers", optimizers(lambda optimizer: optimizer)),
        "the optimizer of configure_optimizers() has the learning rate 0.01, but schedule.base_lr is 0.001; set schedule.base_lr=0.01",
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
        script_facts(lambda run: fit(run, make()), load(tmp_path, *JOB), None)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("callback", "sentence"),
    [
        (
            ModelCheckpoint,
            "fit() got the callback ModelCheckpoint, which a run does not take; set checkpoint.every_steps",
        ),
        (
            lambda: EarlyStopping("val_loss"),
            "fit() got the callback EarlyStopping, which a run does not take; set stop in",
        ),
    ],
)
def test_callbacks_are_answered_by_what_replaces_them(
    tmp_path: Path, callback: Callable[[], pl.Callback], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        script_facts(lambda run: fit(run, Tiny(), callbacks=[callback()]), load(tmp_path, *JOB), None)
    assert str(caught.value).startswith(sentence)


def test_what_is_not_a_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^fit\(\) got a Linear, but it trains a LightningModule"):
        script_facts(lambda run: fit(run, nn.Linear(1, 1)), load(tmp_path, *JOB), None)  # type: ignore[arg-type]


def test_swapped_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^fit\(\) got a Tiny in place of the run; call fit\(run, module, datamodule\) in"
    ):
        script_facts(lambda run: fit(Tiny(), run), load(tmp_path, *JOB), None)  # type: ignore[arg-type]


def test_lightnings_own_loop_in_a_train_function_is_answered_by_what_replaces_it(tmp_path: Path) -> None:
    trainer = pl.Trainer(max_steps=0, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    with pytest.raises(
        SpecError, match=r"call undula.adapters.lightning.fit\(run, module, datamodule\) in place of the fit"
    ):
        script_facts(lambda run: trainer.fit(Tiny()), load(tmp_path, *JOB), None)
    with pytest.raises(
        SpecError, match=r"failed with OSError.*call undula.adapters.lightning.fit\(run, module, datamodule\)"
    ):
        script_facts(lambda run: failing(), load(tmp_path, *JOB), None)


def failing() -> None:
    raise OSError


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
        train_here(lambda run: fit(run, make()), load(tmp_path, *JOB))
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
    # Clipping would hide that a part of the gradient is missing.
    accumulating = (*JOB, "plan.virtual_workers=2", "plan.micro_batch=2", "gradient.max_norm=null")
    found = []
    for make in (Clearing, NotClearing):
        with_batches = type(make.__name__, (make,), {"train_dataloader": loader(batch_size=2)})
        store = train_here(
            lambda run, make=with_batches: fit(run, seeded(make)),
            load(tmp_path, *accumulating, f"name={make.__name__}"),
        )
        found.append(read_ledger(store).steps["loss"].to_pylist())
    assert found[0] == found[1]


class ClipsByTorch(Tiny):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def test_a_hook_that_changes_gradients_before_they_are_reduced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^clip_grad_norm_\(\) changed a gradient of an open step"):
        train_here(lambda run: fit(run, ClipsByTorch()), load(tmp_path, *JOB))


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


def test_a_rate_without_a_scheduler_is_the_one_that_the_yaml_says(tmp_path: Path) -> None:
    def train(run: Any) -> None:
        fit(run, Unscheduled())

    rate = "schedule.base_lr=0.01"
    with pytest.raises(
        UsageError, match=r"^configure_optimizers\(\) returned no scheduler, .* set schedule.decay=constant"
    ):
        train_here(train, load(tmp_path, *JOB, rate))
    steps = read_ledger(train_here(train, load(tmp_path, *JOB, rate, "schedule.decay=constant"))).steps
    assert steps["lr"].to_pylist() == [0.01] * 6
    steps = read_ledger(train_here(train, load(tmp_path, *JOB, rate, "schedule.decay=cosine", "name=cosine"))).steps
    assert steps["lr"].to_pylist()[-1] == pytest.approx(0.001)


def test_rates_that_a_module_sets_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^the script changed the learning rate of parameter group 0 from 0.01 to 0.005"
    ):
        train_here(
            lambda run: fit(run, SetsRates()),
            load(tmp_path, *JOB, "schedule.base_lr=0.01", "schedule.decay=constant"),
        )


def test_a_missing_library_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(SpecError, match=r"^pytorch_lightning is not installed; run pip install 'undula\[lightning\]'$"):
        require_lightning()
