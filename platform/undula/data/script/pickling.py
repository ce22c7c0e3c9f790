"""Pickling of functions and datasets of a script, which other processes load without the script's module."""

import copyreg
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def dumps(value: Any) -> bytes:
    """Pickle a value, and functions and classes of the script by value."""
    from ray import cloudpickle  # some processes that import this module need no Ray

    pickle_modules_by_name()
    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def pickle_modules_by_name() -> None:
    """Let cloudpickle pickle modules with classes of their own by name, such as torch.backends.cudnn and torch.ops.

    A function with the names `torch` and `ops`, or `torch.distributed` and `config`, as in `run.config`, seems to need the module of that
    name, which cloudpickle then pickles with it. It does not know modules with classes of their own for modules, and fails.
    """
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType) and type(module) is not ModuleType:
            copyreg.pickle(type(module), _by_name)


def _by_name(module: ModuleType) -> tuple[Any, tuple[str]]:
    return import_module, (module.__name__,)
