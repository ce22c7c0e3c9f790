"""Hooks of a LightningModule, its data and its callbacks, called in Lightning's order in the driver and on a rank."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from undula.adapters.lightning.data import Data
from undula.adapters.lightning.goals import Goals, problem_with
from undula.adapters.lightning.library import Library, Schedulers, name_of
from undula.adapters.lightning.stand_in import FitTrainer
from undula.adapters.own_tensors import OwnTensors
from undula.adapters.refusals import CALLBACKS, DISPLAYS, MODULE_HOOKS, refused_override
from undula.errors import UsageError
from undula.plan.plan import Plan
from undula.train.script_source import refuse_number_of_workers

OF_GOALS = ("EarlyStopping", "ModelCheckpoint")
"""Callbacks of Lightning that are left out if the job does their work."""


class Hooks:
    """Objects of one call of `fit`.

    Args:
        module: The module.
        loaders: DataLoaders that the script passes to `fit`, by the name of the hook that each replaces; None if it passes none.
        datamodule: LightningDataModule; None if the script has none.
        callbacks: Callbacks of the script.
        virtual_workers: Number of virtual workers of the plan.
        rank: Rank of this process.
        device: Device of this process.
        goals: Goals of the job; None if the driver has compared them with the callbacks.

    Raises:
        UsageError: A run does not support something in the module or its callbacks.
    """

    def __init__(
        self,
        module: Any,
        loaders: Mapping[str, Any],
        datamodule: Any,
        callbacks: Sequence[Any],
        virtual_workers: int,
        rank: int,
        device: torch.device,
        goals: Goals | None = None,
    ):
        self.library = library = Library.of(module)
        _check_module(module, library)
        own = module.configure_callbacks()
        given = [*callbacks, *(own if isinstance(own, Sequence) else [own])]
        _check_callbacks(given, goals)
        self.callbacks = [callback for callback in given if not _named(callback, (*DISPLAYS, *OF_GOALS))]
        self.own_tensors = OwnTensors(
            module, [*(each for each in self.callbacks if not library.is_overridden("state_dict", each)), module]
        )
        """Tensors that no checkpoint has."""
        self._loaders = dict(loaders)
        if isinstance(loaders["train_dataloader"], library.datamodule_class):
            datamodule, self._loaders["train_dataloader"] = loaders["train_dataloader"], None
        self.module, self._datamodule, self._device = module, datamodule, device
        self.validates = library.is_overridden("validation_step", module)
        self.trainer = FitTrainer(module, datamodule, self.callbacks, virtual_workers, rank, device, library.size_of)
        module.trainer = self.trainer
        if datamodule is not None:
            datamodule.trainer = self.trainer

    def prepare_data(self) -> bool:
        """Call prepare_data in one process of this machine after the other, because several may download the same files."""
        with (Path(tempfile.gettempdir()) / f"undula-prepare-data-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._datamodule is not None:
                self._datamodule.prepare_data()
            self.call("prepare_data", calls_callbacks=False)
        return True

    def set_up(self, plan_of: Callable[[Data], Plan]) -> Data:
        """Call the hooks before the training that follow prepare_data, up to configure_model.

        Args:
            plan_of: Function that takes the DataLoaders, as soon as there are any, and returns the plan.

        Returns:
            The DataLoaders.
        """
        if self._datamodule is not None:
            self._datamodule.setup(stage="fit")
            data = self._data()
            self.trainer.plan = plan_of(data)
        self.call("setup", stage="fit")
        if self._datamodule is None:
            data = self._data()
            self.trainer.plan = plan_of(data)
        self.call("configure_model", calls_callbacks=False)
        return data

    def _data(self) -> Data:
        training = self._loader("train_dataloader")
        if training is None:
            name = name_of(self.module if self._datamodule is None else self._datamodule)
            raise UsageError(
                f"fit() found no training data: {name} has no train_dataloader(); add it, or pass a DataLoader"
            )
        return Data(training, self._loader("val_dataloader") if self.validates else None)

    def _loader(self, hook: str) -> Any:
        """Return a DataLoader of the script: the one given to fit, or that of the data module or the module; None if there is none."""
        if self._loaders[hook] is not None:
            return self._loaders[hook]
        owner = self.module if self._datamodule is None else self._datamodule
        return getattr(owner, hook)() if self.library.is_overridden(hook, owner) else None

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, Schedulers | None]:
        """Return the optimizer, and the schedulers if there are any."""
        returned = self.call("configure_optimizers", calls_callbacks=False)
        optimizer, configs = self.library.optimizers_of(returned)
        self.trainer.optimizers = self.trainer.strategy._lightning_optimizers = [optimizer]
        self.trainer.lr_scheduler_configs = configs
        return optimizer, Schedulers(optimizer, configs, self._step_scheduler) if configs else None

    def call(self, hook: str, *arguments: Any, calls_callbacks: bool = True, **named: Any) -> Any:
        """Call a hook of the callbacks and of the module, and return the module's answer."""
        module = self.module
        former, module._current_fx_name = module._current_fx_name, hook
        try:
            for callback in self.callbacks if calls_callbacks else ():
                getattr(callback, hook)(self.trainer, module, *arguments, **named)
            # Sanity checks and their like are hooks of callbacks alone.
            return getattr(module, hook)(*arguments, **named) if hasattr(module, hook) else None
        finally:
            module._current_fx_name = former

    def call_step(self, hook: str, batch: Any, index: int) -> Any:
        """Call a step of the module through its forward pass, whose hooks set the precision and gather sharded weights."""
        module, forward = self.module, self.module.__dict__.get("forward")

        def step(*given: Any) -> Any:
            restore()
            return self.call(hook, *given, calls_callbacks=False)

        def restore() -> None:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward

        module.forward = step
        try:
            return module(*self.library.arguments_of(getattr(module, hook), batch, index))
        finally:
            restore()

    def transferred(self, batch: Any) -> Any:
        """Return a batch after the transfer hooks that the script overrides. Its tensors are on the device before."""
        for hook, arguments in (
            ("on_before_batch_transfer", ()),
            ("transfer_batch_to_device", (self._device,)),
            ("on_after_batch_transfer", ()),
        ):
            for owner in (self._datamodule, self.module):
                if owner is not None and self.library.is_overridden(hook, owner):
                    batch = getattr(owner, hook)(batch, *arguments, 0)
                    break
        return batch

    def _step_scheduler(self, scheduler: Any) -> None:
        self.call("lr_scheduler_step", scheduler, None, calls_callbacks=False)

    def tear_down(self) -> None:
        if self._datamodule is not None:
            self._datamodule.teardown(stage="fit")
        self.call("teardown", stage="fit")

    def capture(self) -> dict[str, Any]:
        """Return what a checkpoint of Lightning would hold beside the weights."""
        entry, own = {}, {}
        if self._has_hook("on_save_checkpoint"):
            entry = self._entry()
            own = dict(entry)
            if self.library.is_overridden("on_save_checkpoint", self.module):
                self.module.on_save_checkpoint(own)
            for callback in self.callbacks:
                if self.library.is_overridden("on_save_checkpoint", callback):
                    callback.on_save_checkpoint(self.trainer, self.module, own)
        parts = {str(number): callback.state_dict() for number, callback in enumerate(self.callbacks)}
        data = self._datamodule.state_dict() if self._datamodule is not None else {}
        return {
            "entry": {key: value for key, value in own.items() if key not in entry},
            "callbacks": parts,
            "datamodule": data,
        }

    def _has_hook(self, hook: str) -> bool:
        return any(self.library.is_overridden(hook, owner) for owner in (self.module, *self.callbacks))

    def _entry(self) -> dict[str, Any]:
        """Return what hooks find in a checkpoint. The weights are those of the run, whatever a hook leaves out of them."""
        trainer = self.trainer
        weights = dict(self.module.state_dict())
        return {"state_dict": weights, "epoch": trainer.current_epoch, "global_step": trainer.global_step}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore what `capture` returned."""
        if self._has_hook("on_load_checkpoint"):
            values = {**values, "entry": {**self._entry(), **values["entry"]}}
        if self.library.is_overridden("on_load_checkpoint", self.module):
            self.module.on_load_checkpoint(values["entry"])
        for number, callback in enumerate(self.callbacks):
            if self.library.is_overridden("on_load_checkpoint", callback):
                callback.on_load_checkpoint(self.trainer, self.module, values["entry"])
            if state := values["callbacks"].get(str(number)):
                callback.load_state_dict(state)
        if self._datamodule is not None and values["datamodule"]:
            self._datamodule.load_state_dict(values["datamodule"])


def _check_module(module: Any, library: Library) -> None:
    """Refuse a module that trains in a way that a run does not support.

    Raises:
        UsageError: It does.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UsageError(
            f"{name} sets automatic_optimization=False, but a run calls backward and steps the one optimizer itself; return the loss from "
            "training_step, or write the loop with run.steps()"
        )
    for hook in MODULE_HOOKS:
        if library.is_overridden(hook, module):
            raise refused_override(type(module), hook, MODULE_HOOKS)
    refuse_number_of_workers(module.training_step, "self.trainer.world_size")
    for step in ("training_step", "validation_step"):
        if library.takes(getattr(module, step), "dataloader_iter"):
            raise UsageError(
                f"{name}.{step}() takes dataloader_iter, but a run reads the batches by the plan; take batch and batch_idx"
            )


def _check_callbacks(callbacks: Sequence[Any], goals: Goals | None) -> None:
    """Refuse callbacks whose work a run does itself or cannot resume, unless the job has the same goals.

    Raises:
        UsageError: There is one.
    """
    problems = []
    for callback in callbacks:
        if _named(callback, OF_GOALS):
            problems.append(problem_with(callback, goals))
        elif name := _named(callback, CALLBACKS):
            got = f"fit() got the callback {type(callback).__name__}, which a run does not take"
            problems.append(f"{got}; {CALLBACKS[name]}")
    if refused := list(filter(None, problems)):
        raise UsageError(". ".join(refused))


def _named(callback: Any, names: Collection[str]) -> str | None:
    """Return the first of some names of Lightning's classes that a callback is of; None if there is none."""
    bases = (base.__name__ for base in type(callback).__mro__ if "lightning" in base.__module__)
    return next((name for name in bases if name in names), None)
