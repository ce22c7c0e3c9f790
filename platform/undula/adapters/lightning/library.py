"""The library from which a script has its LightningModule: `pytorch_lightning` or `lightning.pytorch`, which have the same modules."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from undula.errors import UsageError, needs_extra

NAMES = ("pytorch_lightning", "lightning.pytorch")


class Library:
    """Functions of Lightning with which a run reads a module as Lightning itself does.

    Args:
        name: Name of the package.
    """

    def __init__(self, name: str):
        self._name = name
        self.datamodule_class: type = self._get("LightningDataModule")
        self.trainer_class: type = self._get("Trainer")
        self.is_overridden: Callable[..., bool] = self._get("utilities.model_helpers:is_overridden")
        self.size_of: Callable[[Any], int] = self._get("utilities.data:extract_batch_size")
        self._takes = self._get("utilities.signature_utils:is_param_in_hook_signature")
        self._optimizers = self._get("core.optimizer:_configure_optimizers")
        self._configs_of = self._get("core.optimizer:_configure_schedulers_automatic_opt")

    @classmethod
    def of_script(cls) -> "Library":
        """Return the library that the script has imported, whatever objects it has of it."""
        return cls(next((name for name in NAMES if name in sys.modules), NAMES[0]))

    @classmethod
    def of(cls, module: object) -> "Library":
        """Return the library of a module.

        Raises:
            UsageError: The object is not a LightningModule.
        """
        for name in NAMES:
            if name in sys.modules and isinstance(module, sys.modules[name].LightningModule):
                return cls(name)
        raise UsageError(
            f"fit() got {name_of(module)}, but it trains a LightningModule; pass the module itself, not compiled or wrapped, or write the "
            "loop with run.steps()"
        )

    def takes(self, step: Callable[..., Any], parameter: str) -> bool:
        """Return whether a step of a module takes a parameter of this name."""
        return bool(self._takes(step, parameter, explicit=True))

    def arguments_of(self, step: Callable[..., Any], batch: Any, index: int) -> tuple[Any, ...]:
        """Return the arguments of a step of a module, which takes the index of its batch or not."""
        return (batch, index) if self._takes(step, "batch_idx", min_args=2) else (batch,)

    def optimizers_of(self, returned: Any) -> tuple[torch.optim.Optimizer, list[Any]]:
        """Return the optimizer and the settings of the schedulers that `configure_optimizers` returned.

        Raises:
            UsageError: There is not exactly one optimizer, or a run cannot step one of the schedulers.
        """
        if returned is None:
            raise UsageError("configure_optimizers() returned None, but a run needs an optimizer; return one")
        optimizers, schedulers, monitor = self._optimizers(returned)
        configs: list[Any] = self._configs_of(schedulers, monitor)
        if len(optimizers) != 1:
            raise UsageError(
                f"configure_optimizers() returned {len(optimizers)} optimizers, but a run has one; use one optimizer with several "
                "parameter groups"
            )
        for config in configs:
            if config.reduce_on_plateau:
                raise UsageError(
                    "configure_optimizers() returned a ReduceLROnPlateau, which needs a metric at each of its steps; use a scheduler that "
                    "depends on the number of steps or epochs only"
                )
            if config.frequency != 1:
                raise UsageError(
                    f"configure_optimizers() returned a scheduler with frequency={config.frequency}, but a run steps it every time; divide "
                    "the number of steps in the scheduler itself"
                )
        return optimizers[0], configs

    def _get(self, path: str) -> Any:
        module, _, name = path.rpartition(":")
        return getattr(import_module(f"{self._name}.{module}" if module else self._name), name)


class Schedulers(LRScheduler):
    """Schedulers that Lightning would step after each step, or at the end of each epoch.

    Args:
        optimizer: Optimizer of the schedulers.
        configs: Lightning's settings of the schedulers.
        step_one: Function that steps a scheduler, by the module's hook.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, configs: list[Any], step_one: Callable[[Any], None]):
        # The base class would set learning rates itself.
        self.optimizer = optimizer
        self.epochs_done = 0
        """Number of epochs that have ended with the step that is about to be committed."""
        self._configs = configs
        self._step_one = step_one
        self._epochs = 0

    def step(self, epoch: int | None = None) -> None:
        """Step the schedulers after a step. One that counts epochs catches up if the last step of an epoch was skipped."""
        intervals = ["step", *["epoch"] * (self.epochs_done - self._epochs)]
        self._epochs = max(self._epochs, self.epochs_done)
        for interval in intervals:
            for config in self._configs:
                if config.interval == interval:
                    self._step_one(config.scheduler)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self._epochs, "schedulers": [config.scheduler.state_dict() for config in self._configs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epochs = state_dict["epochs"]
        for config, state in zip(self._configs, state_dict["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)


def require_lightning() -> None:
    """Check that Lightning is installed.

    Raises:
        SpecError: It is not.
    """
    with needs_extra("lightning"):
        if find_spec("lightning") is None:
            import_module("pytorch_lightning")


def name_of(value: object) -> str:
    """Return the name of an object's type with its article, for a message."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
