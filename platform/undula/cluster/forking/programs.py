"""Programs in a process that has imported the slow modules already: the imports, and what `python arguments...` does."""

import atexit
import gc
import importlib
import importlib.util
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
}
"""Environment variables with which these modules start no threads, because threads do not exist in a fork. torch reads the number of
OpenMP threads when it is imported. Ray sets it to 1, too, for a worker with one CPU, but only after the fork."""


def import_all(names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Import modules with an environment, which this process keeps."""
    os.environ.clear()
    os.environ.update({**environment, **ONE_THREAD})
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    for name in ONE_THREAD:
        os.environ.pop(name)
    gc.freeze()  # otherwise, the first collection in a fork would copy the pages of all objects
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError(f"{', '.join(names)}: the import has started threads, which a fork would not have")


@contextmanager
def ids_from_the_system() -> Iterator[None]:
    """Let the system draw the ids of classes of actors, which does not change what Ray will draw."""
    actor: Any = importlib.import_module("ray.actor")
    kind = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: kind(os.urandom(kind.size())))
    yield
    actor.ActorClassID = kind


def use_threads() -> None:
    """Let torch have as many threads as if this process had imported it itself."""
    if torch := sys.modules.get("torch"):
        given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        torch.set_num_threads(int(given) if given.isdecimal() else len(os.sched_getaffinity(0)))


def run_program(arguments: list[str]) -> None:
    """Do what `python arguments...` does."""
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(rest[0], vars(main))
    else:
        script = Path(first).absolute()
        sys.argv = arguments
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")


def paths_in_environment() -> list[str]:
    """Return the folders of PYTHONPATH."""
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def call_and_end(function: Callable[[], object]) -> NoReturn:
    """Call a function and end the process as the interpreter does at the end of a script."""
    status = 0
    try:
        function()
    except SystemExit as end:
        if isinstance(end.code, int | None):
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with suppress(BaseException):
            finish()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(status)
