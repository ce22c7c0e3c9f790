"""Tests of what an adapter for Lightning refuses, in the driver and in the loop."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from adapters_kit import job_of_script
from lightning_kit import JOB, Tiny, loader, optimizers, tiny, train_module
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from undula.adapters.lightning import Trainer, fit
from undula.adapters.lightning.library import require_lightning
from undula.config.job import load_spec
from undula.driver.model_facts import script_facts
from undula.errors import SpecError, UsageError


class Scaled(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scaled(self.net(batch[0]).square().mean())

    def scaled(self, loss: Any) -> Any:
        return loss * dist.get_world_size()


class Manual(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.ones(3)])


WEIGHTED = loader(sampler=WeightedRandomSampler([1.0] * 12, 12))
ON_PLATEAU = optimizers(lambda it: {"optimizer": it, "lr_scheduler": ReduceLROnPlateau(it), "monitor": "val_loss"})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Linear(1, 1), "fit() got a Linear, but it trains a LightningModule"),
        (Scaled, "test_lightning_refusals.py:31: get_world_size() of torch.distributed is called for a batch"),
        (Manual, "Manual sets automatic_optimization=False, but a run calls backward"),
        (tiny(training_step=lambda self, dataloader_iter: None), "Tiny.training_step() takes dataloader_iter"),
        (tiny(backward=lambda self, loss: None), "Tiny overrides backward(), which a run does not call; a run calls backward itself"),
        (tiny(train_dataloader=lambda self: [1, 2]), "train_dataloader() returned a list, but a run reads one"),
        (tiny(train_dataloader=WEIGHTED), "train_dataloader() returned a DataLoader with a WeightedRandomSampler; set shuffle= instead"),
        (tiny(val_dataloader=WEIGHTED), "val_dataloader() returned a DataLoader with a WeightedRandomSampler; set shuffle= instead"),
        (tiny(train_dataloader=lambda self: DataLoader(Endless())), "train_dataloader() returned a DataLoader of an Iter"),
        (tiny(configure_optimizers=optimizers(lambda it: [it, it])), "configure_optimizers() returned 2 optimizers, but a run has"),
        (tiny(configure_optimizers=ON_PLATEAU), "configure_optimizers() returned a ReduceLROnPlateau, which needs a metric"),
        (tiny(setup=lambda self, stage: self.trainer.strategy.barrier()), "self.trainer.strategy.barrier was read, but a run has no"),
        (tiny(setup=lambda self, stage: self.trainer.log_dir), "self.trainer.log_dir was read, but Undula runs the module without"),
    ],
)  # fmt: skip
def test_what_a_run_does_not_support_is_refused_before_a_worker_starts(
    tmp_path: Path, make: Callable[[], Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        job_of_script(lambda: Trainer(max_epochs=1).fit(make()), tmp_path)
    assert str(caught.value).startswith(sentence)


def fit_with(callbacks: Any) -> None:
    Trainer(callbacks=callbacks).fit(Tiny())


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (lambda: Trainer(strategy="ddp"), "Trainer does not take strategy=; remove it; a model"),
        (lambda: Trainer(limit_train_batches=0.1), "Trainer does not take limit_train_batches=; remove it; a run takes all"),
        (lambda: Trainer(max_time="1:0", gpus=2), "Trainer does not take max_time=; set workers.fleet in the job's YAML. Trainer got"),
        (lambda: Trainer(gpus=2), "Trainer got gpus=, which it does not know; remove it"),
        (lambda: Trainer(precision="64-true"), "Trainer got precision='64-true'; set it to one of '32-true', '32', 32, 'bf16-mixed'"),
        (lambda: Trainer(max_epochs=-1), "Trainer got max_epochs=-1, which never ends"),
        (lambda: Trainer(val_check_interval=0.5, check_val_every_n_epoch=2), "Trainer got val_check_interval=0.5 and check_val_every_n"),
        (lambda: Trainer().fit(Tiny(), ckpt_path="last"), "Trainer.fit() does not take ckpt_path=; submit the job"),
        (lambda: Trainer().test(Tiny()), "Trainer.test is not possible in a run; load the weights"),
        (lambda: fit_with(ModelCheckpoint()), "fit() got the callback ModelCheckpoint, which a run does not take; set checkpoint"),
        (lambda: fit_with([ModelCheckpoint(), EarlyStopping("loss")]),
         "fit() got the callback ModelCheckpoint, which a run does not take; set checkpoint.every_steps in the job's YAML, and "
         "checkpoint.keep_best for the best one. fit() got the callback EarlyStopping, which"),
        (lambda: fit_with([EarlyStopping("loss")]), "fit() got the callback EarlyStopping, which a run does not take; set stop in"),
    ],
)  # fmt: skip
def test_what_lightnings_trainer_does_and_a_run_does_not_is_refused(
    tmp_path: Path, script: Callable[[], None], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        job_of_script(script, tmp_path)
    assert str(caught.value).startswith(sentence)


def examine(train: Callable[[Any], None], folder: Path, *overrides: str) -> None:
    """Run the train function of a script of `undula.main` in the driver."""
    (folder / "digits.yaml").write_text(JOB)
    script_facts(train, load_spec(folder / "digits.yaml", overrides), None)


MAKES = "the DataLoader of train_dataloader() makes "
DROPS = lambda self: DataLoader(TensorDataset(torch.ones(13, 3)), 4, drop_last=True)  # noqa: E731
PLAIN = optimizers(lambda it: it)


@pytest.mark.parametrize(
    ("method", "value", "overrides", "sentence"),
    [
        ("train_dataloader", loader(batch_size=3), (), f"{MAKES}plan.micro_batch 3, but the job has 4; set it in the job's YAML"),
        ("train_dataloader", loader(shuffle=True), (), f'{MAKES}plan.shuffle "window", but the job has "none"; set it'),
        ("train_dataloader", DROPS, (), f'{MAKES}plan.last_step "drop", but the job has "short"'),
        ("configure_optimizers", PLAIN, (), "the optimizer of configure_optimizers() makes schedule.base_lr 0.01, but the job has 0.001"),
        ("configure_optimizers", PLAIN, ("schedule.base_lr=0.01",), "configure_optimizers() returned no scheduler, with which Lightning"),
    ],
)  # fmt: skip
def test_fit_refuses_a_plan_of_the_yaml_that_the_script_contradicts(
    tmp_path: Path, method: str, value: Any, overrides: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        examine(lambda run: fit(run, tiny(**{method: value})()), tmp_path, *overrides)
    assert str(caught.value).startswith(sentence)


def test_swapped_arguments_are_refused() -> None:
    sentence = r"^fit\(\) got a Tiny in place of the run; call fit\(run, module, datamodule\)"
    with pytest.raises(UsageError, match=sentence):
        fit(Tiny(), Tiny())  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", ["", "failed with OSError"])
def test_lightnings_own_loop_in_a_train_function_is_answered_by_what_replaces_it(tmp_path: Path, failure: str) -> None:
    trainer = pl.Trainer(max_steps=0, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)

    def train(run: Any) -> None:
        if failure:
            raise OSError
        trainer.fit(Tiny())

    sentence = rf"{failure}.*call undula.adapters.lightning.fit\(run, module, datamodule\) in place of the fit"
    with pytest.raises(SpecError, match=sentence):
        examine(train, tmp_path)


def log_late(module: Any) -> None:
    module.log("late", 1.0)


def log_a_sum(module: Any, batch: Any, batch_idx: int) -> None:
    module.log("sum", 1.0, reduce_fx="sum")


def log_of_tokens(module: Any, batch: Any, batch_idx: int) -> Any:
    loss = module.net(batch[0]).square().mean()
    module.log("tokens", loss, batch_size=99)
    return loss


def clip(module: Any) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


class SetsRates(tiny(configure_optimizers=PLAIN)):  # type: ignore[misc]
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01 / (1 + self.global_step)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (tiny(training_step=lambda self, batch, batch_idx: None), "training_step() returned a NoneType without a loss"),
        (tiny(on_train_epoch_end=log_late), "self.log('late') was called in on_train_epoch_end(), which belongs to no batch"),
        (tiny(validation_step=log_a_sum), "self.log('sum') got reduce_fx='sum', but a run takes the mean over samples"),
        (tiny(training_step=log_of_tokens), "self.log('tokens') got batch_size=99 for 4 samples, but a run takes the mean over"),
        (tiny(on_after_backward=clip), "clip_grad_norm_() changed a gradient of an open step"),
        (SetsRates, "the script changed the learning rate of parameter group 0 from 0.01 to 0.005"),
    ],
)  # fmt: skip
def test_wrong_calls_in_hooks_are_refused(tmp_path: Path, make: type[Tiny], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        train_module(make, tmp_path)
    assert str(caught.value).startswith(sentence)


def test_a_missing_library_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(SpecError, match=r"^pytorch_lightning is not installed; run pip install 'undula\[lightning\]'$"):
        require_lightning()
