"""A job under a trace of spot nodes or a schedule of faults, and what became of it: `undula chaos`."""

import json
import math
import sys
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from undula.errors import SpecError
from undula.state.ledger import Ledger, read_ledger
from undula.storage import Store
from undula.testing.chaos import Chaos, Done, Driver, replay, start_driver
from undula.testing.faults import Fault, oracle_rank_s, parse_faults, parse_trace
from undula.testing.nodes import nodes

FIRST_STEP_LIMIT_S = 180.0


@dataclass(frozen=True)
class Ordeal:
    """What happens to a job: a trace's changes, or a schedule of faults."""

    faults: tuple[Fault, ...] = ()
    changes: tuple[tuple[float, int], ...] = ()
    """(seconds, nodes)"""
    end_s: float = 0.0
    """Of a trace."""
    notice_s: float = 0.0
    no_notice_share: float = 0.0
    first_nodes: int = 2


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    done: tuple[Done, ...]
    steps: int
    steps_lost: int
    """Done twice."""
    outages_s: tuple[float, ...]
    """After each thing that happened: the longest time without a step until the next one; one for those with no step between them."""
    useful_rank_s: float
    oracle_rank_s: float
    """Of a trace: what all nodes would have done, if a resize took no time."""
    problem: str | None = None
    """Why this does not say how the job stands all that was to happen to it."""

    def lines(self) -> list[str]:
        """For a terminal."""
        outages = sorted(self.outages_s)
        found = [
            f"{len(self.done)} faults, {self.steps} steps, {self.steps_lost} of them lost and done again",
            f"outage: median {np.median(outages):.2f} s, longest {outages[-1]:.2f} s" if outages else "no outage",
        ]
        if self.oracle_rank_s:
            share = self.useful_rank_s / self.oracle_rank_s
            found.append(
                f"useful: {self.useful_rank_s:.0f} of the {self.oracle_rank_s:.0f} rank-seconds of an oracle that resizes in no time: "
                f"{share:.3f}"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def from_trace(
    path: Path, speedup: float, most: int, changes: int | None, notice_s: float, no_notice_share: float
) -> Ordeal:
    """The ordeal of a trace's file; of its busiest stretch with so many changes where `changes` is given.

    Raises:
        SpecError: the file is no trace.
    """
    try:
        trace = parse_trace(json.loads(path.read_text()), str(path))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read as a trace: {error}") from None
    trace = trace.window(changes, most) if changes else trace
    found = trace.changes(speedup, most)
    return Ordeal((), found, len(trace.counts) * trace.gap_s / speedup, notice_s, no_notice_share, found[0][1])


def from_faults(path: Path, first_nodes: int) -> Ordeal:
    """The ordeal of a schedule's file; SpecError where a line is no fault."""
    try:
        return Ordeal(parse_faults(path.read_text(), str(path)), first_nodes=first_nodes)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from None


def undergo(
    ordeal: Ordeal,
    command: Sequence[str],
    folder: Path,
    store: Store,
    low: int,
    limit_s: float,
    show: Callable[[str], None],
) -> Outcome:
    """Run a job's script through an ordeal on a local cluster of several nodes.

    Args:
        ordeal: what happens.
        command: the script's.
        folder: where it runs.
        store: its run directory.
        low: fewest workers.
        limit_s: for a schedule of faults, seconds to the end of the job.
        show: gets its lines.
    """
    with nodes() as cluster:
        for _ in range(max(ordeal.first_nodes, 1)):
            cluster.add()
        cluster.await_all()
        driver = start_driver(command, cluster, show, folder)
        chaos = Chaos(cluster, store, driver)
        try:
            if ordeal.changes:
                _await_first_step(driver)
                began = replay(
                    chaos, cluster, driver, ordeal.changes, ordeal.end_s, ordeal.notice_s, ordeal.no_notice_share
                )
            else:
                began = time.time()
                chaos.run(ordeal.faults, limit_s)
            status = driver.process.poll()
        finally:
            driver.stop()
    found = outcome(read_ledger(store), tuple(chaos.done), ordeal, began, low)
    return replace(found, problem=_problem(status, chaos.left, is_trace=bool(ordeal.changes)))


def _problem(status: int | None, left: Sequence[Fault], is_trace: bool) -> str | None:
    if status:
        return f"the job ended with status {status}"
    if is_trace and status is not None:
        return "the job ended before the trace: give it more steps, with plan.epochs= and plan.max_steps="
    return f"the job ended before it was time: {'; '.join(map(str, left))}" if left else None


def outcome(ledger: Ledger, done: tuple[Done, ...], ordeal: Ordeal, began: float, low: int) -> Outcome:
    """The figures of a job that has undergone an ordeal."""
    times = np.sort(np.concatenate([ledger.steps["time"].to_numpy(), ledger.replaced["time"].to_numpy()]))
    outages = outages_s(times.tolist(), [each.time for each in done])
    oracle = oracle_rank_s(ordeal.changes, ordeal.end_s, low) if ordeal.changes else 0.0
    steps = ledger.steps
    within = (steps["time"].to_numpy() >= began) & (steps["time"].to_numpy() <= began + ordeal.end_s)
    seconds = sum(steps[f"{name}_s"].to_numpy() for name in ("compute", "communication", "other"))
    useful = float((seconds * steps["world_size"].to_numpy())[within].sum())
    told = [json.loads(event["data"])["steps"] for event in ledger.events.to_pylist() if event["kind"] == "lost"]
    lost = max(len(ledger.replaced), sum(told))  # rows that were lost with their writer are told of all the same
    return Outcome(done, len(steps), lost, outages, useful, oracle)


def outages_s(steps: Sequence[float], events: Sequence[float]) -> tuple[float, ...]:
    """The longest time without a step from each event to the next one.

    Args:
        steps: when they were done, in order.
        events: when something happened, in order. Those without a step between them count as one.
    """
    before = [-math.inf, *events]
    first = [time for time, last in zip(events, before, strict=False) if bisect(steps, time) > bisect(steps, last)]
    found = []
    for begin, end in zip(first, [*first[1:], math.inf], strict=False):
        within = steps[max(bisect(steps, begin) - 1, 0) : bisect(steps, end)]
        found.append(max((later - earlier for earlier, later in pairwise(within)), default=0.0))
    return tuple(found)


def _await_first_step(driver: Driver) -> None:
    deadline = time.monotonic() + FIRST_STEP_LIMIT_S
    while driver.step < 0 and driver.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)  # paces the looks


def script_command(script: Path, config: str, overrides: Sequence[str], trainer: str) -> list[str]:
    """The command of a job's script."""
    return [sys.executable, script.name, "--config", config, "--fresh", "--trainer", trainer, *overrides]
