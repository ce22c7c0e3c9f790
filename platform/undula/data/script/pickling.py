"""Pickling of functions and datasets of a script, which other processes load without the script's module."""

import copyreg
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from torch.utils._config_module import ConfigModule


def dumps(value: Any) -> bytes:
    """Pickle a value, and functions and classes of the script by value."""
    from ray import cloudpickle  # some processes that import this module need no Ray

    pickle_torch_settings_by_name()
    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def pickle_torch_settings_by_name() -> None:
    """Let cloudpickle pickle torch's modules of settings by name.

    A function with the names `torch.distributed` and `config`, as in `run.config`, seems to need the module torch.distributed.config, which
    cloudpickle then pickles with it. Such modules have classes of their own, so cloudpickle does not know them for modules and fails.
    """
    for module in list(sys.modules.values()):
        if issubclass(type(module), ConfigModule):
            copyreg.pickle(type(module), _by_name)


def _by_name(module: ModuleType) -> tuple[Any, tuple[str]]:
    return import_module, (module.__name__,)
