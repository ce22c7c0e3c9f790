"""Script of a job as a file, which each process of the job executes up to the call of `undula.main`.

Statements at the top level of the script, such as `torch.set_default_dtype`, therefore hold in the workers as they do in the driver, and
its classes and functions are those of an imported module. The sources travel with the job: a worker that starts after the user has edited a
file executes what the driver has executed.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import undula
from undula.data.script.pickling import pickle_main_by_name
from undula.errors import UsageError

OTHER_MAIN = "__mp_main__"
"""Name under which processes of multiprocessing import the script."""
OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
"""Environment variables that say which devices a worker has, and that a script cannot change."""
_calls = 0
"""Number of calls of `undula.main` in the execution of the script so far."""
_awaited = 0
"""Number of the call up to which this process executes a script; 0 if it executes none for a job."""
_ready: Callable[[Any], None] | None = None
"""Train function of an execution that no group has used yet, or that all groups use."""
_is_kept = False
"""Whether all groups of this process use the same execution."""
_written: tempfile.TemporaryDirectory[str] | None = None
_first_folder = Path.cwd()
"""Working directory in which this process has started. With a package of Ray's, it is the node's copy of the submitted folder."""
_lock = threading.Lock()


class _Reached(BaseException):
    """Ends the execution of a script in a worker where it calls `undula.main`. A script's `except Exception` does not catch it."""

    def __init__(self, train: Callable[[Any], None]):
        super().__init__()
        self.train = train


def begin_call(train: Callable[[Any], None]) -> bool:
    """Begin a call of `undula.main`, and return whether the call is to train. It ends the execution of a script in a worker.

    A worker skips calls that the driver has finished. Processes that multiprocessing starts import the script as well, and train nothing.
    """
    global _calls
    _calls += 1
    if _awaited and _calls == _awaited:
        raise _Reached(train)
    imported = sys.modules.get(OTHER_MAIN)
    return not _awaited and (imported is None or imported.__name__ != OTHER_MAIN)


@dataclass(frozen=True)
class ScriptFile:
    """A train function that is found by executing a script."""

    folder: str
    """Path of the folder that holds the sources, in the driver."""
    within: str | None
    """Path of the folder relative to the driver's working directory; None if it is not below it."""
    name: str
    """Path of the script relative to the folder."""
    sources: Mapping[str, bytes]
    """Contents of the script and of the modules that the driver has imported from the folder, by relative path."""
    argv: tuple[str, ...]
    """Arguments of the script."""
    call: int
    """Number of the call of `undula.main`, from 1, that gets the train function."""

    @classmethod
    def of_this_process(cls) -> "ScriptFile | None":
        """Return the script that this process executes and that has called `undula.main`; None if it was not started from a file."""
        main = sys.modules["__main__"]
        path = getattr(main, "__file__", None)
        if path is None or getattr(main, "__spec__", None) is not None or not path.endswith(".py"):
            return None
        script = Path(path).absolute()
        folder = script.parent
        if not script.is_file():
            return None
        files = {script, *(Path(module.__file__) for module in _modules_of(folder) if module.__file__)}
        here = Path.cwd()
        pickle_main_by_name()
        return cls(
            folder=str(folder),
            within=str(folder.relative_to(here)) if folder.is_relative_to(here) else None,
            name=script.name,
            sources={str(file.relative_to(folder)): file.read_bytes() for file in files},
            argv=tuple(sys.argv[1:]),
            call=_calls,
        )

    def __call__(self, run: Any) -> None:
        """Call the train function of a fresh execution, whose variables no earlier group has changed.

        Raises:
            UsageError: The script ends without calling `undula.main`.
            Exception: Any exception that the script raises.
        """
        global _ready
        self.make_ready()
        with _lock:
            train, _ready = _ready, (_ready if _is_kept else None)
        assert train is not None
        train(run)

    def make_ready(self, keeps: bool = False) -> None:
        """Execute the script for the next call, or for all that follow if `keeps`."""
        global _ready, _is_kept
        with _lock:
            _ready = _ready or self._execute()
            _is_kept = _is_kept or keeps

    def _execute(self) -> Callable[[Any], None]:
        folder = self._local_folder()
        for module in _modules_of(folder):
            del sys.modules[module.__name__]
        if sys.path[:1] != [str(folder)]:
            sys.path.insert(0, str(folder))
        path = str(folder / self.name)
        sys.argv = [path, *self.argv]
        main = ModuleType("__main__")
        vars(main).update(__file__=path, __builtins__=__builtins__, __spec__=None)
        sys.modules["__main__"] = sys.modules[OTHER_MAIN] = (
            main  # what processes of multiprocessing send back has the other name
        )
        pickle_main_by_name()
        try:
            with _awaiting(self.call):
                exec(compile(self.sources[self.name], path, "exec"), vars(main))
        except _Reached as reached:
            return reached.train
        except SystemExit as end:
            raise UsageError(
                f"{self.name} has ended with sys.exit({end.code!r}) in a worker, before it called undula.main"
            ) from None
        raise UsageError(
            f"{self.name} has ended in a worker without calling undula.main, which it has called in the driver; call it in every process"
        )

    def _local_folder(self) -> Path:
        """Return a folder of this node with the sources: the driver's, the copy that Ray has made, or a new one with the sources alone."""
        global _written
        if _written is not None:
            return Path(_written.name)
        places = [Path(self.folder), *([_first_folder / self.within] if self.within is not None else [])]
        for place in places:
            if all(_content(place / name) == content for name, content in self.sources.items()):
                return place
        _written = tempfile.TemporaryDirectory(prefix="undula-script-")
        for name, content in self.sources.items():
            file = Path(_written.name, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return Path(_written.name)


def make_ready(train: object, keeps: bool = False) -> None:
    """Execute the script of a train function for its next call, or for all that follow if `keeps`."""
    if isinstance(train, ScriptFile):
        train.make_ready(keeps)


@contextmanager
def _awaiting(call: int) -> Iterator[None]:
    """Execute a script in a block up to a call of `undula.main`."""
    global _calls, _awaited
    kept = {name: os.environ[name] for name in OWN_VARIABLES if name in os.environ}
    _calls, _awaited = 0, call
    try:
        yield
    finally:
        _awaited = 0
        os.environ.update(kept)


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _modules_of(folder: Path) -> list[ModuleType]:
    """Return the imported modules whose files lie in a folder, without installed packages and this one."""
    excluded = (os.path.realpath(Path(undula.__file__).parent), os.path.realpath(sys.prefix))
    real, root = (
        cache(os.path.realpath),
        os.path.realpath(folder),
    )  # cached, because thousands of modules share few folders

    def is_inside(module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or module.__name__ in ("__main__", OTHER_MAIN):
            return False
        place = Path(real(Path(file).parent))
        return (
            place.is_relative_to(root)
            and not {"site-packages", "dist-packages"} & set(place.parts)
            and not any(place.is_relative_to(other) for other in excluded)
        )

    return [module for module in list(sys.modules.values()) if is_inside(module)]
