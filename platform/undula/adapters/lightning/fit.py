"""Training of a LightningModule under the loop of a run: the steps and the validations, with the hooks around them."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from undula.adapters.lightning.data import Data, refuse_difference
from undula.adapters.lightning.goals import goals_of_run
from undula.adapters.lightning.hooks import Hooks
from undula.adapters.lightning.library import name_of
from undula.adapters.lightning.stand_in import FitTrainer
from undula.config.yaml_file import Setting
from undula.errors import UsageError
from undula.plan.plan import Plan
from undula.train.metrics import is_metric
from undula.train.run import Run
from undula.train.step import Step

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningDataModule, LightningModule

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
) -> FitTrainer:
    """Train a LightningModule as `Trainer.fit` does, with the plan, the schedule and the other settings of the job.

    Args:
        run: The run.
        module: Module with `training_step`, `configure_optimizers`, and `validation_step` if the run is to validate.
        train_dataloaders: DataLoader of the training data, or a LightningDataModule; by default the module's own `train_dataloader`.
        val_dataloaders: DataLoader of the validation data.
        datamodule: LightningDataModule with the data.
        callbacks: Callbacks of the script, beside those of `configure_callbacks`.
        name: Name of the training data, as for `run.dataset`.

    Returns:
        What the module has found as `self.trainer`, such as the means of the last validation as its `callback_metrics`.

    Raises:
        UsageError: A run does not support something in the module, its data or its callbacks.
    """
    if hasattr(run, "prepare_data"):  # a module and a data module have this hook
        raise UsageError(
            f"fit() got {name_of(run)} in place of the run; call fit(run, module, datamodule) in the train function, which gets the run"
        )
    loaders = {"train_dataloader": train_dataloaders, "val_dataloader": val_dataloaders}
    hooks = Hooks(module, loaders, datamodule, callbacks, run.virtual_workers, run.rank, run.device, goals_of_run(run))
    _Fit(run, hooks).train(name)
    return hooks.trainer


class _Fit:
    """One call of `fit` on a rank, or in the driver up to the model.

    Args:
        run: The run.
        hooks: The module, its data and its callbacks.
    """

    def __init__(self, run: Run, hooks: Hooks):
        self._run = run
        self._hooks = hooks
        self._trainer = hooks.trainer
        self._recorder = hooks.trainer.recorder
        self._begun_epochs = 0
        """Number of epochs whose on_train_epoch_start was called, which is part of the run's state."""
        self._epoch_is_open = False
        self._validated_batches: int | None = None
        """Number of batches that this rank has validated; None outside of a validation."""

    def train(self, name: str | None) -> None:
        """Train to the end of the plan."""
        self._set_up(name)
        self._hooks.call("on_fit_start")
        self._run.state("lightning", self._capture, self._restore)
        try:
            self._train()
        except BaseException as end:
            # What is no error ends the group between two steps, and the next group goes on.
            if not isinstance(end, Exception):
                self._hooks.tear_down()
            raise
        self._take_means()  # for a group that has only the work after the training left
        self._hooks.call("on_train_end")
        self._hooks.call("on_fit_end")
        self._hooks.tear_down()

    def _set_up(self, name: str | None) -> None:
        """Give the run the data, the module and the optimizer. In the driver, `run.model` ends the script."""
        run, hooks = self._run, self._hooks

        def plan_of(data: Data) -> Plan:
            data.give(run, name)
            data.check(run.plan)
            return run.plan

        run.keep("prepare_data of Lightning", hooks.prepare_data)
        hooks.set_up(plan_of)
        run.preflight(self._check_decay)
        run.model(hooks.module)
        optimizer, self._schedulers = self._configured()
        run.optimizer(optimizer, self._schedulers)

    def _check_decay(self, given: Collection[str]) -> None:
        """Refuse a module without a scheduler unless the job says how its learning rate decays."""
        if self._configured()[1] is None and "schedule.decay" not in given:
            raise UsageError(
                "configure_optimizers() returned no scheduler, with which Lightning keeps the learning rate constant, but a job decays "
                "it along a cosine by default; set schedule.decay=constant in the job's YAML, or another decay that the run shall have"
            )

    def _configured(self) -> Any:
        """Return the optimizer and the schedulers. Without a scheduler, the optimizer must have the learning rate of the job."""
        optimizer, schedulers = self._hooks.configure_optimizers()
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if schedulers is None and self._run.base_lr not in rates:
            rate = Setting(rates[0], "the optimizer of configure_optimizers()")
            refuse_difference({"schedule.base_lr": rate}, "schedule.base_lr", self._run.base_lr)
        return optimizer, schedulers

    def _train(self) -> None:
        run, trainer = self._run, self._trainer
        validate = self._validate if self._hooks.validates else None
        steps = run.steps(validate=validate, after_step=self._after_step)
        trainer.sanity_checking = True
        has_started = False
        while (step := next(steps, None)) is not None:
            self._end_validation({})  # the one before the first step, which Lightning calls a sanity check
            if not has_started:
                trainer.sanity_checking = False
                self._hooks.call("on_train_start")
                self._hooks.own_tensors.take()
                has_started = True
            self._train_step(step)
        if self._epoch_is_open:
            self._end_epoch()

    def _train_step(self, step: Step) -> None:
        run, trainer, optimizer = self._run, self._trainer, self._trainer.optimizers[0]
        shape = run.plan.step(step.index)
        trainer.global_step, trainer.current_epoch = step.index, shape.epoch
        if shape.epoch >= self._begun_epochs:
            self._hooks.call("on_train_epoch_start")
            self._begun_epochs = shape.epoch + 1
        self._epoch_is_open = True
        self._recorder.step = step
        is_first, last = True, None
        for received in step.batches():
            assert step.micro_batch is not None
            place = run.plan.step(step.micro_batch.step).step_in_epoch
            index = place * trainer.accumulate_grad_batches + step.micro_batch.number
            batch = self._recorder.batch = self._hooks.transferred(received)
            outputs = self._train_batch(step, batch, index, is_first)
            is_first = False
            if step.is_last:
                last = outputs, batch, index
            else:
                self._end_batch(outputs, batch, index)
                step.keep_gradients()  # in Lightning, a batch can be a step, after which hooks may free gradients
        step.reduce()
        self._hooks.call("on_before_optimizer_step", optimizer)
        if self._schedulers:
            self._schedulers.epochs_done = (step.index + step.merged_steps) // run.plan.steps_per_epoch
        step.update()
        trainer.global_step = step.index + step.merged_steps
        assert last is not None
        self._end_batch(*last)
        self._hooks.own_tensors.after_step(step.index, self._run.warn_of_state)

    def _train_batch(self, step: Step, batch: Any, index: int, is_first: bool) -> dict[str, Any]:
        """Run a micro-batch, and return what callbacks get as its outputs."""
        if self._hooks.call("on_train_batch_start", batch, index) == -1:
            raise UsageError(
                "on_train_batch_start() returned -1, but an epoch of the plan has all of its samples; end the run with "
                "self.trainer.should_stop = True"
            )
        returned = self._hooks.call_step("training_step", batch, index)
        extra = {key: value for key, value in returned.items() if key != LOSS} if isinstance(returned, Mapping) else {}
        loss = returned.get(LOSS) if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"training_step() returned {name_of(returned)} without a loss, but a step of the plan has all of its samples; return a "
                "loss for every batch"
            )
        if is_first:
            self._hooks.call("on_before_zero_grad", self._trainer.optimizers[0])
        self._hooks.call("on_before_backward", loss)
        step.backward(loss)
        self._hooks.call("on_after_backward")
        outputs = {LOSS: loss.detach() / self._trainer.accumulate_grad_batches, **extra}
        return tree_map_only(Tensor, Tensor.detach, outputs)  # type: ignore[no-any-return]

    def _end_batch(self, outputs: dict[str, Any], batch: Any, index: int) -> None:
        step, self._recorder.step = self._recorder.step, None  # the step of the last batch is committed
        self._hooks.call("on_train_batch_end", outputs, batch, index)
        self._recorder.step = step

    def _after_step(self, done: int, means: Mapping[str, float] | None) -> None:
        """End the validation and the epoch after a step, and the run if the script asks for it."""
        run, plan = self._run, self._run.plan
        self._recorder.step = None
        self._trainer.global_step, self._trainer.current_epoch = done, plan.step(done - 1).epoch
        if means is not None:
            self._end_validation(means)
        if done % plan.steps_per_epoch == 0 or done == run.last_step:
            self._end_epoch()
        if self._trainer.should_stop:
            run.stop("the script set trainer.should_stop")

    def _end_epoch(self) -> None:
        self._hooks.call("on_train_epoch_end")
        self._epoch_is_open = False

    def _validate(self, received: Any) -> dict[str, Any]:
        """Return the means and the metrics of a batch."""
        self._begin_validation()
        batch, index = self._hooks.transferred(received), self._validated_batches
        assert index is not None
        means: dict[str, Any] = {}
        self._recorder.means, self._recorder.batch = means, batch
        self._hooks.call("on_validation_batch_start", batch, index)
        returned = self._hooks.call_step("validation_step", batch, index)
        self._hooks.call("on_validation_batch_end", returned, batch, index)
        self._recorder.means = None
        self._validated_batches = index + 1
        loss = returned.get(LOSS) if isinstance(returned, Mapping) else returned
        named = [mean for name, mean in means.items() if LOSS in name.lower()]
        loss = means.get("val_loss", means.get(LOSS, loss))
        if not (isinstance(loss, Tensor) or is_metric(loss)) and len(named) == 1:
            loss = named[0]
        if not (isinstance(loss, Tensor) or is_metric(loss)):
            raise UsageError(
                "validation_step() neither logs val_loss, or a single value whose name has loss in it, nor returns a loss, of which a run "
                "needs the mean; add self.log('val_loss', loss)"
            )
        self._check_goals({**means, LOSS: loss})
        return {**means, LOSS: loss}

    def _check_goals(self, means: Mapping[str, Any]) -> None:
        """Check that a validation has the metrics of the job's goals, before the hooks at its end, which may log them too late."""
        for key, goal in self._run.goals.items():
            if goal and goal.metric not in means:
                raise UsageError(
                    f"{key} has metric {goal.metric!r}, but validation_step() logs {sorted(means)}; set one of these, or log "
                    f"{goal.metric!r} in validation_step(), as the mean over the samples of the batch or as a metric of torchmetrics "
                    "itself, because on_validation_epoch_end() and other hooks belong to no batch"
                )

    @torch.no_grad()
    def _begin_validation(self) -> None:
        if self._validated_batches is not None:
            return
        self._validated_batches = 0
        self._trainer.training, self._trainer.validating = False, True
        if self._trainer.sanity_checking:
            self._hooks.call("on_sanity_check_start")
        moved = [] if self._trainer.sanity_checking else self._hooks.own_tensors.moved()
        self._hooks.call("on_validation_start")
        self._hooks.call("on_validation_epoch_start")
        if moved and not self._run.has_weights_of_step:
            self._hooks.own_tensors.refuse_average(moved)

    @torch.no_grad()
    def _end_validation(self, means: Mapping[str, float]) -> None:
        """Call the last hooks of a validation, if there was one.

        Args:
            means: Its means over all ranks; empty for the one before the first step.
        """
        if means:
            self._begin_validation()  # unless this rank has had a batch
        if self._validated_batches is None:
            return
        self._take_means()
        self._hooks.call("on_validation_epoch_end")
        self._hooks.call("on_validation_end")
        if self._trainer.sanity_checking:
            self._hooks.call("on_sanity_check_end")
        self._hooks.own_tensors.take()
        self._validated_batches = None
        self._trainer.training, self._trainer.validating = True, False

    def _take_means(self) -> None:
        means = self._run.means.items()
        self._trainer.callback_metrics = {key: torch.tensor(mean, device="cpu") for key, mean in means}

    def _capture(self) -> dict[str, Any]:
        place = self._trainer.current_epoch, self._trainer.global_step
        return {"begun_epochs": self._begun_epochs, "place": place, **self._hooks.capture()}

    def _restore(self, values: Mapping[str, Any], is_unfinished: bool) -> None:
        self._begun_epochs = values["begun_epochs"]
        # A validation that is repeated is no longer the one before the first step.
        self._trainer.sanity_checking = False
        self._trainer.current_epoch, self._trainer.global_step = values.get("place", (0, 0))
        self._hooks.restore(values)
