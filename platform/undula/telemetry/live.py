"""Live view of a run: a status line that is rewritten once a second, below the lines of events and of the user's output."""

import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from textwrap import wrap
from typing import Any, TextIO

from undula.state.events import StartEvent
from undula.telemetry.messages import Line, Message, Status, clock

INTERVAL_S = 1.0
"""Seconds between two reads of the hub."""
STATUS_PREFIX = "step "
_EVENT = re.compile(r"\d\d:\d\d:\d\d  ")
"""Beginning of the line of an event."""
_RESULT = re.compile(r"(finished|(failed|stopped) after \d)")
"""Beginning of the line with which a driver says how training ended."""
TABLE_TOP, TABLE_FOOT, LAST_TABLE_FOOT = "┏", "└", "┗"


def status_line(status: Status) -> str:
    """Return a status line, such as `step 120/400  loss 2.4131  lr 2.10e-03  812 samples/s  2 workers  0:41 left`."""
    workers = f"{status.world_size} worker{'s' if status.world_size != 1 else ''}"
    width = len(str(status.total_steps))
    return (
        f"{STATUS_PREFIX}{status.step:>{width}}/{status.total_steps}  loss {status.loss:.4f}  lr {status.lr:.2e}  "
        f"{status.samples_per_s:,.0f} samples/s  {workers}  {clock(status.seconds_left)} left"
    )


def _wrapped(line: str) -> list[str]:
    """Return the line of an event, broken between words where the terminal would break it anywhere."""
    columns = shutil.get_terminal_size().columns
    return wrap(line, columns, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False)


class LiveScreen:
    """Prints lines. On a terminal, a new status line or table replaces the previous one; elsewhere, all lines are printed below each other.

    A table is recognized by its frame of box-drawing characters. A table with a heavy last line is final and stays on the screen.
    """

    def __init__(self, out: TextIO):
        self._out = out
        with suppress(AttributeError, OSError):
            out.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]  # a script may print what the terminal cannot show
        self._rewrites = out.isatty()
        self._status: list[str] = []
        self._table: list[str] = []
        self._lock = threading.Lock()

    def show(self, line: str) -> None:
        """Print one line, or collect it if it belongs to a table. Several threads may call this."""
        with self._lock:
            self._show(line)

    def _show(self, line: str) -> None:
        if not self._rewrites:
            self._out.write(f"{line}\n")
        elif line.startswith(TABLE_TOP) or self._table:
            self._table.append(line[: shutil.get_terminal_size().columns - 1])  # a line that wraps would take two rows
            if line.startswith(TABLE_FOOT):
                self._rewrite([], self._table)
                self._table = []
            elif line.startswith(LAST_TABLE_FOOT):
                self._rewrite(self._table, [])
                self._table = []
        elif line.startswith(STATUS_PREFIX):
            self._rewrite([], [line[: shutil.get_terminal_size().columns - 1]])
        else:
            if _RESULT.match(line):
                self.close()  # nothing follows that the status could be about
            self._rewrite(_wrapped(line) if _EVENT.match(line) else [line], self._status)
        self._out.flush()

    def close(self) -> None:
        """End the last status line, which stays on the screen."""
        if self._status:
            self._out.write("\n")
            self._out.flush()
            self._status = []

    def _rewrite(self, lines: list[str], status: list[str]) -> None:
        """Replace the status on the screen with `lines`, and print a new status below them."""
        up = f"\x1b[{len(self._status) - 1}A" if len(self._status) > 1 else ""
        erase = f"{up}\r\x1b[J" if self._status else ""
        self._out.write(erase + "".join(f"{line}\n" for line in lines) + "\n".join(status))
        self._status = status


def message_lines(messages: list[Message]) -> list[str]:
    """Return the lines to print for a batch of messages: all events and printed lines in order, and then the newest status."""
    lines = []
    last_status = None
    for message in messages:
        if isinstance(message, Status):
            last_status = status_line(message)
        elif isinstance(message, Line):
            lines.append(f"rank {message.rank}: {message.text}")
        else:
            if isinstance(message, StartEvent):
                last_status = None  # it has the former number of workers
            at = f"{time.strftime('%H:%M:%S', time.localtime(message.time))}  "
            names_step = not message.step or re.search(rf"\b{message.step}\b", message.message)
            lines.append(f"{at}{message.message}" + ("" if names_step else f" (step {message.step})"))
    return lines + ([last_status] if last_status else [])


@contextmanager
def live_view(
    hub: Any, out: TextIO = sys.stdout, keep: Callable[[list[str]], None] = lambda _lines: None
) -> Iterator[None]:
    """Print the messages of a hub until the block ends, and pass their lines to `keep`, also if there are none for a while."""
    # This import is not at the top, because the client that follows a job imports this module before it sets Ray's token.
    from undula.telemetry.hub import HubFollower

    screen = LiveScreen(out)

    def show(messages: list[Message]) -> None:
        lines = message_lines(messages)
        for line in lines:
            screen.show(line)
        keep(lines)

    try:
        with HubFollower(hub, show, INTERVAL_S):
            yield
    finally:
        screen.close()
