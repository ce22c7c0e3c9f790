"""Waits of tests. Each has a limit, and its failure says what the test waited for and what was there instead."""

import inspect
import subprocess
import time
from collections.abc import Callable
from typing import Any


def wait_until(
    condition: Callable[[], object],
    limit_s: float = 120.0,
    process: "subprocess.Popen[Any] | None" = None,
    about: Callable[[], object] | None = None,
    interval_s: float = 0.02,
) -> None:
    """Wait until a condition holds.

    Args:
        condition: What the test waits for.
        limit_s: Maximum time in seconds.
        process: Process without which the condition cannot come true. The test fails as soon as it has ended.
        about: Returns what the failure's message shows of the state; by default, the output of the process.
        interval_s: Seconds between two looks.
    """
    deadline_s = time.monotonic() + limit_s
    while not condition():
        has_ended = process is not None and process.poll() is not None
        if (has_ended and not condition()) or time.monotonic() > deadline_s:
            why = f"the process ended with {process.returncode}" if process and has_ended else f"{limit_s:.0f} s passed"
            shown = about() if about else process.communicate() if process and has_ended else ""
            raise AssertionError(f"{why} while the test waited for `{_source(condition)}`: {shown}")
        time.sleep(interval_s)


def _source(condition: Callable[[], object]) -> str:
    """Return the line of code that defines a condition."""
    try:
        return " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):  # a method of an extension, or code that was not read from a file
        return repr(condition)
