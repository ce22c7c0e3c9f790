"""Pickling of functions, settings and datasets of a script for other processes."""

import copyreg
import io
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol, TypeAlias

Reduce: TypeAlias = Callable[[Any], Any]
"""Function that returns how a value is pickled, as `__reduce__` does; NotImplemented for the usual way."""
_folder: Path | None = None
"""Folder of the script, if the processes that load what this one pickles have the script's module, too, under the name `__main__`."""


def pickle_main_by_name(folder: Path) -> None:
    """Pickle functions and classes of the script's module by name from now on, because other processes have it as well.

    Args:
        folder: Folder of the script.
    """
    global _folder
    _folder = folder


class SupportsWrite(Protocol):
    """File to which a pickler writes."""

    def write(self, data: Any, /) -> object: ...


def _as_usual(value: Any) -> Any:
    return NotImplemented


def dumps(value: Any, reduce: Reduce = _as_usual) -> bytes:
    """Pickle a value. Functions and classes of the script are pickled by value, unless all processes have its module.

    Args:
        value: Value to pickle.
        reduce: Function like `Pickler.reducer_override`, which is asked first.
    """
    file = io.BytesIO()
    pickle_into(file, value, reduce)
    return file.getvalue()


def pickle_into(file: SupportsWrite, value: Any, reduce: Reduce) -> None:
    """Write to a file what `dumps` returns."""
    from ray.cloudpickle import Pickler  # some processes that import this module need no Ray

    base: Any = Pickler

    class ScriptPickler(base):  # type: ignore[misc]
        """Pickler for which the script's module is one that can be imported."""

        def reducer_override(self, value: Any) -> Any:
            reduced = reduce(value)
            if reduced is not NotImplemented:
                return reduced
            is_of_script = isinstance(value, type | FunctionType) and value.__module__ == "__main__"
            if _folder and is_of_script and _named(value.__qualname__) is value:
                return value.__qualname__
            return base.reducer_override(self, value)

    pickle_modules_by_name()
    pickler: Any = ScriptPickler(file)
    pickler.dump(value)


def dumps_by_value(value: Any) -> bytes:
    """Pickle a value for a process that has neither the script nor the modules beside it, such as a task of Ray Data."""
    from ray import cloudpickle

    modules: Any = modules_of(_folder) if _folder else []
    for module in modules:
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        pickle_modules_by_name()
        return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


def modules_of(folder: Path) -> list[ModuleType]:
    """Return the modules that Python has imported from a folder, as those beside a script. This package is not among them."""
    root = os.path.realpath(folder)

    @cache  # thousands of modules share few folders
    def parts_below(parent: str) -> tuple[str, ...] | None:
        place = Path(os.path.realpath(parent))
        return place.relative_to(root).parts if place.is_relative_to(root) else None

    def is_inside(module: ModuleType) -> bool:
        file, parts = getattr(module, "__file__", None), tuple(str(getattr(module, "__name__", "")).split("."))
        if not isinstance(file, str) or parts[0] == "undula" or not file.startswith(os.sep):
            return False  # modules that torch makes have paths such as `_ops.py`
        parent, _, name = file.rpartition(os.sep)
        below = parts_below(parent)
        return below is not None and (*below, name.partition(".")[0]) in (parts, (*parts, "__init__"))

    return [module for module in list(sys.modules.values()) if is_inside(module)]


def _named(name: str) -> Any:
    """Return what the script's module has under a qualified name; None if it has nothing."""
    value: Any = sys.modules["__main__"]
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


@dataclass(frozen=True)
class Pickled:
    """A value that is unpickled where it is needed, after the process has executed the script."""

    content: bytes

    @classmethod
    def of(cls, value: Any) -> "Pickled":
        """Pickle a value, unless it is one of this class."""
        return value if isinstance(value, cls) else cls(dumps(value))


def unpickled(value: Any) -> Any:
    """Return the value in a Pickled, and any other value as it is."""
    return pickle.loads(value.content) if isinstance(value, Pickled) else value


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
