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
from undula.state.events import LostEvent
from undula.state.ledger import Ledger, events_of, read_ledger, steps_done
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
class Outage:
    """The longest time without a step from something that happened to the next that did."""

    faults: tuple[str, ...]
    """Several, where there was no step between them."""
    step: int
    """Steps committed by then."""
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    done: tuple[Done, ...]
    steps: int
    """Of the plan."""
    updates: int
    """Of the optimizer, which takes several steps as one where the batch is elastic."""
    steps_lost: int
    """Done twice."""
    outages: tuple[Outage, ...]
    useful_rank_s: float | None = None
    oracle_rank_s: float | None = None
    """Of a trace: what all nodes would have done, if a resize took no time."""
    problem: str | None = None
    """Why this does not say how the job stands all that was to happen to it."""

    def lines(self) -> list[str]:
        """For a terminal."""
        found = [f"{'outage':>8}  {'at step':>7}  after"] if self.outages else []
        found += [f"{each.seconds:6.2f} s  {each.step:7}  {'; '.join(each.faults)}" for each in self.outages]
        steps = f"{self.steps} steps" + (f" in {self.updates} updates" if self.updates != self.steps else "")
        found.append(f"{len(self.done)} faults, {steps}, {self.steps_lost} of them lost and done again")
        if outages := [each.seconds for each in self.outages]:
            found.append(f"outage: median {np.median(outages):.2f} s, longest {max(outages):.2f} s")
        if self.useful_rank_s is not None and self.oracle_rank_s and not self.problem:
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
        SpecError: the file is no trace, or a number is out of its range.
    """
    for name, value, is_right in (
        ("--speedup", speedup, speedup > 0),
        ("--notice", notice_s, notice_s >= 0),
        ("--no-notice-share", no_notice_share, 0 <= no_notice_share <= 1),
        ("--changes", changes, changes is None or changes > 0),
    ):
        if not is_right:
            raise SpecError(f"command line: {name} is {value}, which is out of its range")
    try:
        trace = parse_trace(json.loads(path.read_text()), str(path))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read as a trace: {error}") from None
    if changes and changes > (there_are := len(trace.changes(speedup, most)) - 1):
        raise SpecError(
            f"command line: --changes is {changes}, and {path} has {there_are} of up to workers.max ({most}) nodes"
        )
    trace = trace.window(changes, most) if changes else trace
    found = trace.changes(speedup, most)
    return Ordeal((), found, len(trace.counts) * trace.gap_s / speedup, notice_s, no_notice_share, found[0][1])


def from_faults(path: Path, first_nodes: int, steps: int | None) -> Ordeal:
    """The ordeal of a schedule's file.

    Args:
        path: the file.
        first_nodes: of the cluster.
        steps: that the job has at most.

    Raises:
        SpecError: a line is no fault, or one that cannot happen.
    """
    try:
        faults = parse_faults(path.read_text(), str(path))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from None
    last_node = first_nodes - 1 + sum(fault.action == "add" for fault in faults)
    for fault in faults:
        if fault.action in ("kill", "drain") and fault.target > last_node:
            raise SpecError(f"{path}: '{fault}': nodes are counted from 0 as they are added, here to {last_node}")
        if steps is not None and fault.at_step is not None and fault.at_step >= steps:
            raise SpecError(f"{path}: '{fault}': the job's last step is {steps} (plan.max_steps)")
    return Ordeal(faults, first_nodes=first_nodes)


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
        driver = start_driver(command, cluster.cluster, show, folder)
        chaos = Chaos(cluster, store, driver)
        try:
            if ordeal.changes:
                most = max(count for _, count in ordeal.changes)
                show(f"chaos: {len(ordeal.changes) - 1} changes in {ordeal.end_s:.0f} s, at most {most} nodes")
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
    return f"the job has ended, and this has not happened: {'; '.join(map(str, left))}" if left else None


def outcome(ledger: Ledger, done: tuple[Done, ...], ordeal: Ordeal, began: float, low: int) -> Outcome:
    """The figures of a job that has undergone an ordeal."""
    times = np.sort(np.concatenate([ledger.steps["time"].to_numpy(), ledger.replaced["time"].to_numpy()]))
    told = [event.steps for event in events_of(ledger.events, LostEvent)]
    lost = max(len(ledger.replaced), sum(told))  # rows that were lost with their writer are told of all the same
    steps = ledger.steps
    found = Outcome(done, steps_done(steps), len(steps), lost, outages(times.tolist(), done))
    if not ordeal.changes:
        return found
    within = (steps["time"].to_numpy() >= began) & (steps["time"].to_numpy() <= began + ordeal.end_s)
    seconds = sum(steps[f"{name}_s"].to_numpy() for name in ("compute", "communication", "other"))
    useful = float((seconds * steps["world_size"].to_numpy())[within].sum())
    return replace(found, useful_rank_s=useful, oracle_rank_s=oracle_rank_s(ordeal.changes, ordeal.end_s, low))


def outages(steps: Sequence[float], done: Sequence[Done]) -> tuple[Outage, ...]:
    """The outages of what has happened, in order; `steps` says when each was done."""
    found: list[list[Done]] = []
    for each in done:
        if found and bisect(steps, each.time) == bisect(steps, found[-1][-1].time):
            found[-1].append(each)
        else:
            found.append([each])
    ends = [*(stall[0].time for stall in found[1:]), math.inf]
    return tuple(
        Outage(tuple(each.fault for each in stall), stall[0].step, _longest_gap(steps, stall[0].time, end))
        for stall, end in zip(found, ends, strict=False)
    )


def _longest_gap(steps: Sequence[float], begin: float, end: float) -> float:
    within = steps[max(bisect(steps, begin) - 1, 0) : bisect(steps, end)]
    return max((later - earlier for earlier, later in pairwise(within)), default=0.0)


def _await_first_step(driver: Driver) -> None:
    deadline = time.monotonic() + FIRST_STEP_LIMIT_S
    while driver.step < 0 and driver.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)  # paces the looks


def script_command(script: Path, config: str, overrides: Sequence[str], trainer: str) -> list[str]:
    """The command of a job's script."""
    return [sys.executable, script.name, "--config", config, "--fresh", "--trainer", trainer, *overrides]
