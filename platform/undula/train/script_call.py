"""Calls of `undula.main` by a script: the driver trains in them, and a worker executes the script up to the one that the driver trains."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OTHER_MAIN = "__mp_main__"
"""Name under which processes of multiprocessing import the script."""
OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "TORCH_NCCL_")
"""Beginnings of environment variables that a script cannot change in a worker: its devices, and how it survives the loss of another one."""
_calls = 0
"""Number of calls in the execution of the script so far."""
_awaited = 0
"""Number of the call up to which this process executes a script; 0 if it executes none for a job."""


class Reached(BaseException):
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
        raise Reached(train)
    is_import = getattr(
        multiprocessing.current_process(), "_inheriting", False
    )  # multiprocessing resets it after the import
    return not _awaited and not is_import


def number_of_calls() -> int:
    """Return the number of calls so far."""
    return _calls


@contextmanager
def up_to_call(number: int) -> Iterator[None]:
    """Execute a script in a block up to a call, counted from 1."""
    global _calls, _awaited
    kept = {name: value for name, value in os.environ.items() if name.startswith(OWN_VARIABLES)}
    _calls, _awaited = 0, number
    try:
        yield
    finally:
        _awaited = 0
        os.environ.update(kept)
