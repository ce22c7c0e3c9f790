"""The library from which a script has its LightningModule: `pytorch_lightning` or `lightning.pytorch`, which have the same modules."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from undula.errors import UsageError, needs_extra

NAMES = ("pytorch_lightning", "lightning.pytorch")


class Library:
    """Functions of Lightning with which a run reads a module as Lightning itself does.

    Args:
        name: Name of the package.
    """

    def __init__(self, name: str):
        self._name = name
        self.module_class: type = self._get("LightningModule")
        self.datamodule_class: type = self._get("LightningDataModule")
        self.callback_class: type = self._get("callbacks:Callback")
        self.is_overridden: Callable[..., bool] = self._get("utilities.model_helpers:is_overridden")
        self._takes = self._get("utilities.signature_utils:is_param_in_hook_signature")
        self._optimizers = self._get("core.optimizer:_configure_optimizers")
        self._schedulers = self._get("core.optimizer:_configure_schedulers_automatic_opt")

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

    def takes_index(self, step: Callable[..., Any]) -> bool:
        """Return whether a step of a module takes the index of its batch."""
        return bool(self._takes(step, "batch_idx", min_args=2))

    def optimizers_of(self, returned: Any) -> tuple[list[Any], list[Any]]:
        """Return the optimizers and the settings of the schedulers that `configure_optimizers` returned.

        Raises:
            UsageError: It returned none.
        """
        if returned is None:
            raise UsageError("configure_optimizers() returned None, but a run needs an optimizer; return one")
        optimizers, schedulers, monitor = self._optimizers(returned)
        return optimizers, self._schedulers(schedulers, monitor)

    def _get(self, path: str) -> Any:
        module, _, name = path.rpartition(":")
        package = f"{self._name}.{module}" if module else self._name
        return getattr(import_module(package), name)


def require_lightning() -> None:
    """Check that Lightning is installed.

    Raises:
        SpecError: It is not.
    """
    with needs_extra("lightning"):
        if find_spec("lightning") is None:
            import_module("pytorch_lightning")


def name_of(found: object) -> str:
    """Return the name of an object's type with its article, for a message."""
    name = type(found).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
