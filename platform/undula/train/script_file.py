"""Script of a job as a file, which each process of the job executes up to the call of `undula.main`.

Statements at the top level of the script, such as `torch.set_default_dtype`, therefore hold in the workers as they do in the driver, and
its classes and functions are those of an imported module. The sources travel with the job: a worker that starts after the user has edited a
file executes what the driver has executed.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from types import ModuleType
from typing import Any

from undula.data.script.pickling import modules_of, pickle_main_by_name
from undula.errors import UsageError
from undula.train.launched_habits import refusal_of
from undula.train.script_call import OTHER_MAIN, Reached, number_of_calls, up_to_call
from undula.train.work_folder import (
    Origin,
    WorkFolder,
    is_of_ray,
    link_files,
    own_folder,
    versions,
    work_folder,
    work_in,
)

_ready: Callable[[Any], None] | None = None
"""Train function of an execution that no group has used yet, or that all groups use."""
_is_kept = False
"""Whether all groups of this process use the same execution."""
_written: tempfile.TemporaryDirectory[str] | None = None
_first_folder: Path | None = None
"""Working directory in which this process has started. In a submitted job, it is the node's copy of the submitted folder."""
_lock = threading.Lock()


@dataclass(frozen=True)
class ScriptFile:
    """A train function that is found by executing a script."""

    folder: str
    """Path of the folder that holds the sources, in the driver."""
    origin: Origin
    """Working directory of the driver."""
    token: str
    """Text that no other submission has."""
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
        script = Path(path).resolve()
        folder = script.parent
        if not script.is_file():
            return None
        files = {script, *(Path(module.__file__).resolve() for module in modules_of(folder) if module.__file__)}
        pickle_main_by_name(folder)
        return cls(
            folder=str(folder),
            origin=Origin.of_this_process(script),
            token=token_hex(8),
            name=script.name,
            sources={str(file.relative_to(folder)): file.read_bytes() for file in files},
            argv=tuple(sys.argv[1:]),
            call=number_of_calls(),
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
        folder = self._place()
        for module in modules_of(folder):
            del sys.modules[module.__name__]
        if sys.path[:1] != [str(folder)]:
            sys.path.insert(0, str(folder))
        path = str(folder / self.name)
        sys.argv = [path, *self.argv]
        main = ModuleType("__main__")
        vars(main).update(__file__=path, __builtins__=__builtins__, __spec__=None)
        # What processes of multiprocessing send back has the other name.
        sys.modules["__main__"] = sys.modules[OTHER_MAIN] = main
        pickle_main_by_name(folder)
        try:
            with up_to_call(self.call):
                exec(compile(self.sources[self.name], path, "exec"), vars(main))
        except Reached as reached:
            return reached.train
        except Exception as error:
            if refusal := refusal_of(error):
                raise refusal from error
            raise
        except SystemExit as end:
            raise UsageError(
                f"{self.name} has ended with sys.exit({end.code!r}) in a worker, before it called undula.main"
            ) from None
        raise UsageError(
            f"{self.name} has ended in a worker without calling undula.main, which it has called in the driver; call it in every process"
        )

    def _place(self) -> Path:
        """Enter the working directory, and return a folder of this node with the sources."""
        global _first_folder
        _first_folder = _first_folder or Path.cwd()
        here, given, origin = work_folder(), Path(self.folder), Path(self.origin.folder)
        within = os.path.relpath(given, origin)
        if here is not None and self._is_in(folder := here.path / within):
            return folder
        if self.origin.is_here():
            os.chdir(origin)
            return given if self._is_in(given) else self._written()
        if is_of_ray(_first_folder) and self._is_in(_first_folder / within):
            path, before = own_folder(self.token, _first_folder), versions(_first_folder)
            folder = path / within
        else:  # the node has its own files, perhaps those of its image
            path, before = own_folder(self.token, origin, links=True), {}
            folder = given if self._is_in(given) else self._written()
        work_in(WorkFolder(path, before))
        return folder

    def _is_in(self, folder: Path) -> bool:
        return all(_content(folder / name) == content for name, content in self.sources.items())

    def _written(self) -> Path:
        """Return a folder with the sources alone, and links to what lies beside them on this node."""
        global _written
        if _written is None:
            _written = tempfile.TemporaryDirectory(prefix="undula-script-")
            for name, content in self.sources.items():
                file = Path(_written.name, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            for name in {str(Path(name).parent) for name in self.sources}:
                link_files(Path(self.folder, name), Path(_written.name, name))
        return Path(_written.name)


def make_ready(train: object, keeps: bool = False) -> None:
    """Execute the script of a train function for its next call, or for all that follow if `keeps`."""
    if isinstance(train, ScriptFile):
        train.make_ready(keeps)


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None
