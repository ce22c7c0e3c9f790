"""Scenarios of `undula chaos`: a job runs under a trace of spot nodes or a schedule of faults, and the outcome is measured."""

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

from undula.errors import ClusterError, SpecError
from undula.state.events import LostEvent
from undula.state.ledger import Ledger, events_of, read_ledger, steps_done
from undula.storage import Store
from undula.testing.chaos import Chaos, Driver, InjectedFault, replay, start_driver
from undula.testing.faults import Action, Fault, oracle_rank_s, parse_faults, parse_trace
from undula.testing.nodes import nodes

FIRST_STEP_LIMIT_S = 180.0
"""Time limit in seconds for the first step of a job."""


@dataclass(frozen=True)
class Scenario:
    """Faults that a job runs under: a schedule of faults, or a trace of the number of nodes."""

    faults: tuple[Fault, ...] = ()
    changes: tuple[tuple[float, int], ...] = ()
    """Pairs (seconds, number of nodes) of a trace."""
    end_s: float = 0.0
    """Length of a trace in seconds."""
    notice_s: float = 0.0
    """Length in seconds of the notice before a node of a trace is removed."""
    no_notice_share: float = 0.0
    """Probability that a node of a trace is removed without a notice."""
    first_nodes: int = 2
    """Number of nodes at the start."""


@dataclass(frozen=True)
class Outage:
    """Longest time without a step between a fault and the next fault."""

    faults: tuple[str, ...]
    """Description of the fault, or of several faults without a step between them."""
    step: int
    """Number of committed steps at the first of these faults."""
    seconds: float
    """Length of the outage in seconds."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a scenario."""

    done: tuple[InjectedFault, ...]
    """Faults that have happened."""
    steps: int
    """Number of committed steps of the plan."""
    updates: int
    """Number of optimizer steps, which is smaller than `steps` if an elastic batch merges steps."""
    steps_lost: int
    """Number of steps that were lost and repeated."""
    outages: tuple[Outage, ...]
    useful_rank_s: float | None = None
    """Useful rank-seconds during a trace."""
    oracle_rank_s: float | None = None
    """Rank-seconds, during a trace, of an ideal job that uses all nodes and resizes in no time."""
    problem: str | None = None
    """Reason why the scenario did not run as planned; None if it did."""

    def lines(self) -> list[str]:
        """Return the lines to print on a terminal."""
        lines = [f"{'outage':>8}  {'sent after step':>15}  as scheduled"] if self.outages else []
        lines += [f"{outage.seconds:6.2f} s  {outage.step:15}  {'; '.join(outage.faults)}" for outage in self.outages]
        steps = f"{self.steps} steps" + (f" in {self.updates} updates" if self.updates != self.steps else "")
        lines.append(f"{len(self.done)} faults, {steps}, {self.steps_lost} of them lost and repeated")
        if outages := [outage.seconds for outage in self.outages]:
            lines.append(f"outage: median {np.median(outages):.2f} s, longest {max(outages):.2f} s")
        if self.useful_rank_s is not None and self.oracle_rank_s and not self.problem:
            share = self.useful_rank_s / self.oracle_rank_s
            lines.append(
                f"useful: {self.useful_rank_s:.0f} of the {self.oracle_rank_s:.0f} rank-seconds of an ideal job that resizes in no time "
                f"({share:.3f})"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as a JSON object."""
        return asdict(self)


def from_trace(
    path: Path, speedup: float, most: int, changes: int | None, notice_s: float, no_notice_share: float
) -> Scenario:
    """Return the scenario of a trace.

    Args:
        path: File of the trace.
        speedup: Factor by which the trace is replayed faster.
        most: Maximum number of nodes.
        changes: Number of changes to replay, from the part of the trace with the least time without nodes; by default all.
        notice_s: Length in seconds of the notice before a node is removed.
        no_notice_share: Probability that a node gets no notice.

    Raises:
        SpecError: The file is not a trace, or a number is out of range.
    """
    for name, value, is_valid, fix in (
        ("--speedup", speedup, speedup > 0, "use a positive factor"),
        ("--notice", notice_s, notice_s >= 0, "use 0 or more seconds"),
        ("--no-notice-share", no_notice_share, 0 <= no_notice_share <= 1, "use a probability from 0 to 1"),
        ("--changes", changes, changes is None or changes > 0, "use a positive number"),
    ):
        if not is_valid:
            raise SpecError(f"command line: {name} is {value}, which is out of range; {fix}")
    try:
        trace = parse_trace(json.loads(path.read_text()), str(path))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read as a trace: {error}") from None
    if changes and changes > (num_changes := len(trace.changes(speedup, most)) - 1):
        raise SpecError(
            f"command line: --changes is {changes}, but {path} has only {num_changes} changes up to {most} nodes (workers.max); "
            "set fewer changes or raise workers.max"
        )
    trace = trace.window(changes, most) if changes else trace
    node_counts = trace.changes(speedup, most)
    return Scenario(
        (), node_counts, len(trace.counts) * trace.gap_s / speedup, notice_s, no_notice_share, node_counts[0][1]
    )


def from_faults(path: Path, first_nodes: int, steps: int | None) -> Scenario:
    """Return the scenario of a schedule of faults.

    Args:
        path: File of the schedule.
        first_nodes: Number of nodes at the start.
        steps: Maximum number of steps of the job; None if it has no limit.

    Raises:
        SpecError: A line is not a fault, or its fault cannot happen.
    """
    try:
        faults = parse_faults(path.read_text(), str(path))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from None
    last_node = first_nodes - 1 + sum(fault.action is Action.ADD for fault in faults)
    for fault in faults:
        if fault.action.needs_node and fault.target > last_node:
            raise SpecError(
                f"{path}: '{fault}': there is no node {fault.target}; nodes are numbered in the order in which they are added, "
                f"here from 0 to {last_node}"
            )
        if steps is not None and fault.at_step is not None and fault.at_step >= steps:
            raise SpecError(
                f"{path}: '{fault}': the job ends at step {steps}; use an earlier step or raise plan.max_steps"
            )
    return Scenario(faults, first_nodes=first_nodes)


def run_scenario(
    scenario: Scenario,
    command: Sequence[str],
    folder: Path,
    store: Store,
    low: int,
    limit_s: float,
    show: Callable[[str], None],
) -> Outcome:
    """Run a job under a scenario on a local cluster of several nodes.

    Args:
        scenario: The scenario.
        command: Command of the job's script.
        folder: Working directory of the script.
        store: Run directory of the job.
        low: Minimum number of workers of the job.
        limit_s: Time limit in seconds for a job with a schedule of faults.
        show: Callback for each line of the job.

    Raises:
        ClusterError: The job has exceeded a time limit.
    """
    with nodes() as cluster:
        for _ in range(max(scenario.first_nodes, 1)):
            cluster.add()
        cluster.await_all()
        driver = start_driver(command, cluster.cluster, show, folder)
        chaos = Chaos(cluster, store, driver)
        try:
            if scenario.changes:
                most = max(count for _, count in scenario.changes)
                show(f"chaos: {len(scenario.changes) - 1} changes in {scenario.end_s:.0f} s, at most {most} nodes")
                _await_first_step(driver)
                notices = (scenario.notice_s, scenario.no_notice_share)
                began = replay(chaos, cluster, driver, scenario.changes, scenario.end_s, *notices)
            else:
                began = time.time()
                chaos.run(scenario.faults, limit_s)
            status = driver.process.poll()
        finally:
            driver.stop()
    result = outcome(read_ledger(store), tuple(chaos.injected), scenario, began, low)
    return replace(result, problem=_problem(status, chaos.pending, is_trace=bool(scenario.changes)))


def _problem(status: int | None, pending: Sequence[Fault], is_trace: bool) -> str | None:
    if status:
        return f"the job ended with status {status}"
    if is_trace and status is not None:
        return "the job ended before the end of the trace; give it more steps with plan.epochs= and plan.max_steps="
    return f"the job ended before these faults: {'; '.join(map(str, pending))}" if pending else None


def outcome(ledger: Ledger, done: tuple[InjectedFault, ...], scenario: Scenario, began: float, low: int) -> Outcome:
    """Return the outcome of a scenario that began at a time in seconds since the epoch."""
    times = np.sort(np.concatenate([ledger.steps["time"].to_numpy(), ledger.replaced["time"].to_numpy()]))
    reported = [event.steps for event in events_of(ledger.events, LostEvent)]
    lost = max(len(ledger.replaced), sum(reported))  # the ledger can lose the rows of lost steps, but not the events
    steps = ledger.steps
    result = Outcome(done, steps_done(steps), len(steps), lost, outages(times.tolist(), done))
    if not scenario.changes:
        return result
    within = (steps["time"].to_numpy() >= began) & (steps["time"].to_numpy() <= began + scenario.end_s)
    seconds = sum(steps[f"{name}_s"].to_numpy() for name in ("compute", "communication", "other"))
    useful = float((seconds * steps["world_size"].to_numpy())[within].sum())
    return replace(result, useful_rank_s=useful, oracle_rank_s=oracle_rank_s(scenario.changes, scenario.end_s, low))


def outages(steps: Sequence[float], done: Sequence[InjectedFault]) -> tuple[Outage, ...]:
    """Return the outages after faults, in order, given the time of each step in seconds since the epoch."""
    groups: list[list[InjectedFault]] = []
    for fault in done:
        if groups and bisect(steps, fault.time) == bisect(steps, groups[-1][-1].time):
            groups[-1].append(fault)
        else:
            groups.append([fault])
    ends = [*(faults[0].time for faults in groups[1:]), math.inf]
    return tuple(
        Outage(tuple(injected.fault for injected in faults), faults[0].step, _longest_gap(steps, faults[0].time, end))
        for faults, end in zip(groups, ends, strict=False)
    )


def _longest_gap(steps: Sequence[float], begin: float, end: float) -> float:
    within = steps[max(bisect(steps, begin) - 1, 0) : bisect(steps, end)]
    return max((later - earlier for earlier, later in pairwise(within)), default=0.0)


def _await_first_step(driver: Driver) -> None:
    deadline = time.monotonic() + FIRST_STEP_LIMIT_S
    while driver.step < 0 and driver.process.poll() is None:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the job made no step within {FIRST_STEP_LIMIT_S:.0f} s; the last lines of its output are: {driver.last_lines()}"
            )
        time.sleep(0.1)


def script_command(script: Path, config: str, overrides: Sequence[str], trainer: str) -> list[str]:
    """Return the command that runs a job's script."""
    return [sys.executable, script.name, "--config", config, "--fresh", "--trainer", trainer, *overrides]
