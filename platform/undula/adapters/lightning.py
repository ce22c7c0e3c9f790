"""Training of a LightningModule under the loop of a run.

def train(run: undula.Run) -> None:
    fit(run, Classifier(), Photos())
"""

import fcntl
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from undula.adapters.lightning_checks import (
    check_callbacks,
    check_collate,
    check_module,
    check_plan,
    check_rate,
    check_run,
    check_schedule,
    loaded,
    one_optimizer,
)
from undula.adapters.lightning_library import Library, name_of, require_lightning
from undula.adapters.lightning_schedulers import Schedulers
from undula.adapters.lightning_trainer import FitTrainer
from undula.errors import UsageError, one_sentence
from undula.recovery.worker_state import LeaveGroup
from undula.train.run import Run
from undula.train.step import Step

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningDataModule, LightningModule

with one_sentence():
    require_lightning()
LOSS = "loss"
"""Name of the loss in the result of a step, and among the means of a validation."""


def fit(
    run: Run,
    module: "LightningModule",
    train_dataloaders: "DataLoader[Any] | LightningDataModule | None" = None,
    val_dataloaders: "DataLoader[Any] | None" = None,
    datamodule: "LightningDataModule | None" = None,
    *,
    callbacks: "Sequence[Callback]" = (),
    name: str | None = None,
) -> None:
    """Train a LightningModule as `Trainer.fit` does, with the plan, the schedule and the other settings of the job.

    Args:
        run: The run.
        module: Module with `training_step`, `configure_optimizers`, and `validation_step` if the run is to validate.
        train_dataloaders: DataLoader of the training data, or a LightningDataModule; by default the module's own `train_dataloader`.
        val_dataloaders: DataLoader of the validation data.
        datamodule: LightningDataModule with the data.
        callbacks: Callbacks of the script, beside those of `configure_callbacks`.
        name: Name of the training data, as for `run.dataset`.

    Raises:
        UsageError: A run does not support something in the module, its data or its callbacks.
    """
    check_run(run)
    library = Library.of(module)
    check_module(module, library)
    found = module.configure_callbacks()
    every = [*callbacks, *(found if isinstance(found, Sequence) else [found])]
    check_callbacks(every)
    loaders: dict[str, Any] = {"train_dataloader": train_dataloaders, "val_dataloader": val_dataloaders}
    if isinstance(train_dataloaders, library.datamodule_class):
        datamodule, loaders["train_dataloader"] = train_dataloaders, None
    _Fit(run, library, module, datamodule, every).train(loaders, name)


class _Fit:
    """One call of `fit`: the hooks of a module, its data and its callbacks, in the order in which Lightning calls them.

    Args:
        run: The run.
        library: Library of the module.
        module: The module.
        datamodule: Its data; None if the script has no LightningDataModule.
        callbacks: Callbacks of the script.
    """

    def __init__(self, run: Run, library: Library, module: Any, datamodule: Any, callbacks: list[Any]):
        self._run = run
        self._library = library
        self._module = module
        self._datamodule = datamodule
        self._callbacks = callbacks
        self._trainer = FitTrainer(run, module, datamodule, callbacks)
        self._recorder = self._trainer.recorder
        self._begun_epochs = 0
        """Number of epochs whose on_train_epoch_start was called, which is part of the run's state."""
        self._epoch_is_open = False
        self._validated_batches: int | None = None
        """Number of batches that this rank has validated; None outside of a validation."""
        module.trainer = self._trainer
        if datamodule is not None:
            datamodule.trainer = self._trainer

    def train(self, loaders: Mapping[str, Any], name: str | None) -> None:
        """Train to the end of the plan."""
        self._set_up(loaders, name)
        self._call("on_fit_start")
        self._run.state("lightning", self._capture, self._restore)
        try:
            self._train()
        except LeaveGroup:
            self._tear_down()
            raise
        self._call("on_train_end")
        self._call("on_fit_end")
        self._tear_down()

    def _set_up(self, loaders: Mapping[str, Any], name: str | None) -> None:
        """Give the run the data, the module and the optimizer. The driver comes as far as the module."""
        run, module, datamodule = self._run, self._module, self._datamodule
        run.keep("prepare_data of Lightning", self._prepare_data)
        if datamodule is not None:
            datamodule.setup(stage="fit")
            self._give_data(loaders, name)
        self._call("setup", stage="fit")
        if datamodule is None:
            self._give_data(loaders, name)
        self._call("configure_model", calls_callbacks=False)
        if run.device.type == "meta":
            # The driver ends the script at run.model(), and would not know what is refused after it.
            driver: Any = run
            if self._configured()[1] is None:
                check_schedule(driver.gives("schedule.decay"))
        run.model(module)
        optimizer, schedulers = self._configured()
        self._trainer.optimizers = self._trainer.strategy._lightning_optimizers = [optimizer]
        self._schedulers = schedulers
        run.optimizer(optimizer, schedulers)

    def _prepare_data(self) -> bool:
        """Call prepare_data in one process of this machine after the other, because several may download the same files."""
        with (Path(tempfile.gettempdir()) / f"undula-prepare-data-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._datamodule is not None:
                self._datamodule.prepare_data()
            self._call("prepare_data", calls_callbacks=False)
        return True

    def _give_data(self, loaders: Mapping[str, Any], name: str | None) -> None:
        training = loaded(self._loader(loaders, "train_dataloader"), "train_dataloader")
        validation = None
        if self._library.is_overridden("validation_step", self._module):
            found = self._loader(loaders, "val_dataloader")
            validation = None if found is None else loaded(found, "val_dataloader")
        check_collate(training, validation)
        self._run.dataset(
            training.dataset,  # type: ignore[arg-type]
            validation=validation.dataset if validation else None,  # type: ignore[arg-type]
            collate_fn=training.collate_fn,
            num_workers=training.num_workers,
            name=name,
        )
        check_plan(training, self._run.plan)

    def _loader(self, loaders: Mapping[str, Any], hook: str) -> Any:
        """Return a DataLoader of the script: the one given to fit, or that of the data module or the module; None if there is none."""
        if loaders[hook] is not None:
            return loaders[hook]
        owner = self._datamodule if self._datamodule is not None else self._module
        if self._library.is_overridden(hook, owner):
            return getattr(owner, hook)()
        if hook == "train_dataloader":
            raise UsageError(
                f"fit() found no training data: {name_of(owner)} has no train_dataloader(); add it, or pass a DataLoader"
            )
        return None

    def _configured(self) -> tuple[torch.optim.Optimizer, Schedulers | None]:
        """Return the optimizer, and the schedulers if there are any."""
        optimizers, configs = self._library.optimizers_of(self._call("configure_optimizers", calls_callbacks=False))
        optimizer = one_optimizer(optimizers, configs)
        self._trainer.lr_scheduler_configs = configs
        if configs:
            return optimizer, Schedulers(optimizer, configs, self._step_scheduler)
        check_rate(optimizer, self._run.base_lr)
        return optimizer, None

    def _train(self) -> None:
        run, trainer = self._run, self._trainer
        has_validation = self._library.is_overridden("validation_step", self._module)
        steps = run.steps(validate=self._validate if has_validation else None, after_step=self._after_step)
        trainer.sanity_checking = True
        has_started = False
        while (step := next(steps, None)) is not None:
            self._end_validation({})  # the one before the first step, which Lightning calls a sanity check
            if not has_started:
                trainer.sanity_checking = False
                self._call("on_train_start")
                has_started = True
            self._train_step(step)
        if self._epoch_is_open:
            self._end_epoch()

    def _train_step(self, step: Step) -> None:
        run, trainer, optimizer = self._run, self._trainer, self._trainer.optimizers[0]
        shape = run.plan.step(step.index)
        trainer.global_step, trainer.current_epoch = step.index, shape.epoch
        if shape.epoch >= self._begun_epochs:
            self._call("on_train_epoch_start")
            self._begun_epochs = shape.epoch + 1
        self._epoch_is_open = True
        self._recorder.step = step
        is_first, last = True, None
        for received in step.batches():
            assert step.micro_batch is not None
            place = run.plan.step(step.micro_batch.step).step_in_epoch
            index = place * trainer.accumulate_grad_batches + step.micro_batch.number
            batch = self._transferred(received)
            outputs = self._train_batch(step, batch, index, is_first)
            is_first = False
            if step.is_last:
                last = outputs, batch, index
            else:
                self._end_batch(outputs, batch, index)
                step.keep_gradients()  # in Lightning, a batch can be a step, after which hooks may free gradients
        step.reduce()
        self._call("on_before_optimizer_step", optimizer)
        if self._schedulers:
            self._schedulers.epochs_done = (step.index + step.merged_steps) // run.plan.steps_per_epoch
        step.update()
        trainer.global_step = step.index + step.merged_steps
        assert last is not None
        self._end_batch(*last)

    def _train_batch(self, step: Step, batch: Any, index: int, is_first: bool) -> dict[str, Any]:
        """Run a micro-batch, and return what callbacks get as its outputs."""
        if self._call("on_train_batch_start", batch, index) == -1:
            raise UsageError(
                "on_train_batch_start() returned -1, but an epoch of the plan has all of its samples; end the run with "
                "self.trainer.should_stop = True"
            )
        arguments = (batch, index) if self._library.takes_index(self._module.training_step) else (batch,)
        found = self._call_step("training_step", *arguments)
        extra = {key: value for key, value in found.items() if key != LOSS} if isinstance(found, Mapping) else {}
        loss = found.get(LOSS) if isinstance(found, Mapping) else found
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"training_step() returned {name_of(found)} without a loss, but a step of the plan has all of its samples; return a loss "
                "for every batch"
            )
        if is_first:
            self._call("on_before_zero_grad", self._trainer.optimizers[0])
        self._call("on_before_backward", loss)
        step.backward(loss)
        self._call("on_after_backward")
        outputs = {LOSS: loss.detach() / self._trainer.accumulate_grad_batches, **extra}
        return tree_map_only(Tensor, Tensor.detach, outputs)  # type: ignore[no-any-return]

    def _end_batch(self, outputs: dict[str, Any], batch: Any, index: int) -> None:
        step, self._recorder.step = self._recorder.step, None  # the step of the last batch is committed
        self._call("on_train_batch_end", outputs, batch, index)
        self._recorder.step = step

    def _after_step(self, done: int, means: Mapping[str, float] | None) -> None:
        """End the validation and the epoch after a step, and the run if the script asks for it."""
        run, plan = self._run, self._run.plan
        self._recorder.step = None
        self._trainer.global_step, self._trainer.current_epoch = done, plan.step(done - 1).epoch
        if means is not None:
            self._end_validation(means)
        if done % plan.steps_per_epoch == 0 or done == plan.total_steps:
            self._end_epoch()
        if self._trainer.should_stop:
            run.stop("the script set trainer.should_stop")

    def _end_epoch(self) -> None:
        self._call("on_train_epoch_end")
        self._epoch_is_open = False

    def _validate(self, received: Any) -> dict[str, float | Tensor]:
        """Return the means of a batch."""
        self._begin_validation()
        batch, index = self._transferred(received), self._validated_batches
        assert index is not None
        means: dict[str, float | Tensor] = {}
        self._recorder.means = means
        self._call("on_validation_batch_start", batch, index)
        arguments = (batch, index) if self._library.takes_index(self._module.validation_step) else (batch,)
        found = self._call_step("validation_step", *arguments)
        self._call("on_validation_batch_end", found, batch, index)
        self._recorder.means = None
        self._validated_batches = index + 1
        returned = found.get(LOSS) if isinstance(found, Mapping) else found
        loss = means.get("val_loss", means.get(LOSS, returned))
        if not isinstance(loss, Tensor):
            raise UsageError(
                "validation_step() neither logs val_loss nor returns a loss, of which a run needs the mean; add self.log('val_loss', loss)"
            )
        return {**means, LOSS: loss}

    def _begin_validation(self) -> None:
        if self._validated_batches is not None:
            return
        self._validated_batches = 0
        self._trainer.training, self._trainer.validating = False, True
        if self._trainer.sanity_checking:
            self._call("on_sanity_check_start")
        self._call("on_validation_start")
        self._call("on_validation_epoch_start")

    def _end_validation(self, means: Mapping[str, float]) -> None:
        """Call the last hooks of a validation, if there was one.

        Args:
            means: Its means over all ranks; empty for the one before the first step.
        """
        if means:
            self._begin_validation()  # unless this rank has had a batch
            self._trainer.callback_metrics = {key: torch.tensor(mean, device="cpu") for key, mean in means.items()}
        if self._validated_batches is None:
            return
        self._call("on_validation_epoch_end")
        self._call("on_validation_end")
        if self._trainer.sanity_checking:
            self._call("on_sanity_check_end")
        self._validated_batches = None
        self._trainer.training, self._trainer.validating = True, False

    def _transferred(self, batch: Any) -> Any:
        """Return a batch after the transfer hooks that the script overrides. Its tensors are on the device before."""
        for hook, arguments in (
            ("on_before_batch_transfer", ()),
            ("transfer_batch_to_device", (self._run.device,)),
            ("on_after_batch_transfer", ()),
        ):
            for owner in (self._datamodule, self._module):
                if owner is not None and self._library.is_overridden(hook, owner):
                    batch = getattr(owner, hook)(batch, *arguments, 0)
                    break
        return batch

    def _call(self, hook: str, *arguments: Any, calls_callbacks: bool = True, **named: Any) -> Any:
        """Call a hook of the callbacks and of the module, and return the module's answer."""
        module = self._module
        former, module._current_fx_name = module._current_fx_name, hook
        try:
            for callback in self._callbacks if calls_callbacks else ():
                getattr(callback, hook)(self._trainer, module, *arguments, **named)
            # Sanity checks and their like are hooks of callbacks alone.
            return getattr(module, hook)(*arguments, **named) if hasattr(module, hook) else None
        finally:
            module._current_fx_name = former

    def _call_step(self, hook: str, *arguments: Any) -> Any:
        """Call a step of the module through its forward pass, whose hooks set the precision and gather sharded weights."""
        module, forward = self._module, self._module.__dict__.get("forward")

        def step(*given: Any) -> Any:
            restore()
            return self._call_own(hook, *given)

        def restore() -> None:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward

        module.forward = step
        try:
            return module(*arguments)
        finally:
            restore()

    def _call_own(self, hook: str, *arguments: Any) -> Any:
        return self._call(hook, *arguments, calls_callbacks=False)

    def _step_scheduler(self, scheduler: Any) -> None:
        self._call("lr_scheduler_step", scheduler, None, calls_callbacks=False)

    def _tear_down(self) -> None:
        if self._datamodule is not None:
            self._datamodule.teardown(stage="fit")
        self._call("teardown", stage="fit")

    def _capture(self) -> dict[str, Any]:
        """Return what a checkpoint of Lightning would hold beside the weights."""
        entry: dict[str, Any] = {}
        if self._library.is_overridden("on_save_checkpoint", self._module):
            self._module.on_save_checkpoint(entry)
        for callback in self._callbacks:
            if self._library.is_overridden("on_save_checkpoint", callback):
                callback.on_save_checkpoint(self._trainer, self._module, entry)
        parts = {str(number): callback.state_dict() for number, callback in enumerate(self._callbacks)}
        data = self._datamodule.state_dict() if self._datamodule is not None else {}
        return {"begun_epochs": self._begun_epochs, "entry": entry, "callbacks": parts, "datamodule": data}

    def _restore(self, values: Mapping[str, Any], is_unfinished: bool) -> None:
        self._begun_epochs = values["begun_epochs"]
        self._trainer.sanity_checking = (
            False  # a validation that is repeated is no longer the one before the first step
        )
        if self._library.is_overridden("on_load_checkpoint", self._module):
            self._module.on_load_checkpoint(values["entry"])
        for number, callback in enumerate(self._callbacks):
            if self._library.is_overridden("on_load_checkpoint", callback):
                callback.on_load_checkpoint(self._trainer, self._module, values["entry"])
            if state := values["callbacks"].get(str(number)):
                callback.load_state_dict(state)
        if self._datamodule is not None and values["datamodule"]:
            self._datamodule.load_state_dict(values["datamodule"])
