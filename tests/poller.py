"""Processes that run `undula show`, `undula verify` and `undula ls` on a run again and again while it trains, as a dashboard does."""

import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from ranks import forks

COMMANDS = ("show", "verify", "ls")
POLL_S = 0.1
"""Time in seconds from the start of a poll to the start of the next one, if it does not take longer."""


@dataclass
class Polls:
    """What the polls of a run have found so far. `refresh` adds what is new."""

    queue: Any
    counts: dict[str, int] = field(default_factory=dict)
    """Number of polls by command."""
    steps: int = 0
    """Largest number of steps that a poll has shown."""
    attempts: int = 0
    """Largest number of attempts that a poll has shown."""
    failures: list[str] = field(default_factory=list)

    @property
    def least(self) -> int:
        """Smallest number of polls of a command."""
        return min(self.counts.get(command, 0) for command in COMMANDS)

    def refresh(self) -> "Polls":
        while not self.queue.empty():
            command, failure, steps, attempts = self.queue.get()
            self.counts[command] = self.counts.get(command, 0) + 1
            self.steps, self.attempts = max(self.steps, steps), max(self.attempts, attempts)
            self.failures += [failure] if failure else []
        assert not self.failures, self.failures[0]
        return self


@contextmanager
def polled(runs: str, name: str, env: Mapping[str, str] | None = None, processes: int = 1) -> Iterator[Polls]:
    """Poll a run during this block, and check at its end that no poll failed. The run must have committed a step.

    Args:
        runs: Folder of the run's directory.
        name: Name of the run.
        env: Additional environment variables of the processes that poll.
        processes: Number of processes that poll.
    """
    context = forks()
    ends, queue = context.Event(), context.Queue()
    pollers = [context.Process(target=_poll, args=(runs, name, dict(env or {}), ends, queue)) for _ in range(processes)]
    polls = Polls(queue)
    try:
        for poller in pollers:
            poller.start()
        yield polls
        ends.set()
        deadline = time.monotonic() + 60
        while any(poller.is_alive() for poller in pollers):  # a process ends once its results have been taken
            assert time.monotonic() < deadline
            polls.refresh()
            time.sleep(0.05)
        polls.refresh()
        assert [poller.exitcode for poller in pollers] == [0] * processes
    finally:
        for poller in pollers:
            if poller.pid:
                poller.kill()


def _poll(runs: str, name: str, env: dict[str, str], ends: Any, queue: Any) -> None:
    os.environ.update(env)
    recorded = 0
    while not ends.is_set():
        for command in COMMANDS:
            began = time.monotonic()
            status, out, err = _undula(command, runs if command == "ls" else f"{runs}/{name}", "--json")
            failure, steps, attempts = f"{command}: {status} {out} {err}" if status else "", 0, 0
            if command == "show" and not status:
                shown = json.loads(out)
                steps, attempts, former = shown["steps"], shown["attempts"], recorded
                recorded = steps + shown["replayed_steps"]
                failure = f"show: {former} rows became {recorded}" if recorded < former else ""
            if command == "ls" and not status and "error" in out:
                failure = f"ls: {out}"
            queue.put((command, failure, steps, attempts))
            ends.wait(max(0.0, began + POLL_S - time.monotonic()))


def _undula(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process, and return its status and what it wrote to stdout and stderr."""
    from undula.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("the command did not end")
