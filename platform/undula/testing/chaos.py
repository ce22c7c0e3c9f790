"""Injection of faults into a job that runs on a cluster of several nodes on this machine."""

import heapq
import itertools
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

import psutil

from undula.cluster.local import LocalCluster
from undula.errors import ClusterError
from undula.state.events import FaultEvent, GroupEvent
from undula.state.ledger import EventWriter, last_event, read_ledger
from undula.state.ledger_files import LEDGER
from undula.state.processes import is_alive, send_signal
from undula.storage import Entry, Store
from undula.testing.faults import Action, Fault
from undula.testing.nodes import Nodes

DECISION_INTERVAL_S = 0.05
STOP_TIMEOUT_S = 30.0
_STEP = re.compile(r"^step +(\d+)/(\d+) ")


@dataclass(frozen=True)
class InjectedFault:
    """Fault that has happened."""

    time: float
    """Time just before the fault, in seconds since the epoch."""
    fault: str
    """Description of the fault."""
    step: int
    """Number of committed steps at that time, according to the output of the job."""


@dataclass
class Driver:
    """Driver of a job, in a process of its own. A thread reads its output."""

    process: "subprocess.Popen[str]"
    show: Callable[[str], None]
    """Callback for each line of output."""
    step: int = -1
    """Number of committed steps according to the output; -1 before the first step."""
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, name="undula-chaos-driver", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := _STEP.match(line):
                self.step = int(match[1])
            self.lines.append(line.rstrip("\n"))
            self.show(line.rstrip("\n"))

    def stop(self) -> None:
        """Stop the job if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
            self.process.kill()
        self._reader.join(timeout=5)

    def last_lines(self) -> str:
        """Return the last lines of the output, for messages."""
        return " | ".join(self.lines[-5:])


def start_driver(
    command: Sequence[str], cluster: LocalCluster, show: Callable[[str], None], folder: Path | None = None
) -> Driver:
    """Start the script of a job on a cluster."""
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        env=env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Driver(process, show)


class Chaos:
    """Injector of faults into a cluster while a job runs there.

    Args:
        nodes: Nodes of the cluster.
        store: Run directory of the job, whose ledger has the process id of each rank.
        driver: Driver of the job.
    """

    def __init__(self, nodes: Nodes, store: Store, driver: Driver):
        self._nodes = nodes
        self._store = store
        self._driver = driver
        self._order = list(nodes.nodes)
        self._draining: list[tuple[float, str]] = []
        self._events = EventWriter(store, "chaos")
        self._ledger_files: list[Entry] = []
        """Files of the ledger that `_group` was read from."""
        self._group: GroupEvent | None = None
        self.injected: list[InjectedFault] = []
        self.pending: list[Fault] = []
        """Faults that have not happened yet."""

    def run(self, faults: Sequence[Fault], limit_s: float, steps_after: int | None = None) -> int | None:
        """Inject the faults when they are due, until the job has ended.

        A fault whose rank or node does not exist yet holds up those that are due after it. Otherwise a fast run could lose a node for which
        an earlier fault waits, and that fault would never take place.

        Args:
            faults: Faults to inject.
            limit_s: Time limit of the job in seconds.
            steps_after: Number of steps after the last fault with which the job has trained for long enough. This gives every fault the
                time that it takes, on fast and on slow machines. By default, the job trains to the end of its plan, which can be before
                the last fault.

        Returns:
            The job's exit status; None if the job still runs because it has made `steps_after` steps.

        Raises:
            ClusterError: The job has exceeded the time limit.
        """
        began, last_step = time.monotonic(), self._driver.step
        first_step: float | None = None
        self.pending = list(faults)
        while self._driver.process.poll() is None:
            now, is_over = time.monotonic(), not (self.pending or self._draining)
            if now - began > limit_s:
                raise ClusterError(
                    f"the job did not end within {limit_s:.0f} s; the last lines of its output are: {self._driver.last_lines()}"
                )
            if first_step is None and self._driver.step >= 0:
                first_step = now
            if first_step is not None:
                due = [fault for fault in self.pending if fault.is_due(self._driver.step, now - first_step)]
                for fault in itertools.takewhile(self.inject, sorted(due, key=lambda fault: fault.at_step or 0)):
                    self.pending.remove(fault)
            self.kill_expired()
            if not is_over:
                last_step = self._driver.step
            elif steps_after is not None and self._driver.step >= last_step + steps_after:
                return None
            time.sleep(DECISION_INTERVAL_S)
        self.kill_expired(float("inf"))  # otherwise Ray would end these nodes at an unknown time
        return self._driver.process.returncode

    def inject(self, fault: Fault) -> bool:
        """Inject one fault and return True, or return False if its rank or node does not exist yet."""
        match fault.action:
            case Action.ADD:
                began = time.time()
                self._order.append(self._nodes.add())
                self.record(f"{fault} ({self._order[-1][:8]})", began)
                return True
            case Action.KILL:
                return self._inject_into_node(fault, self._nodes.kill)
            case Action.DRAIN:
                return self._inject_into_node(fault, lambda node: self.drain(node, fault.deadline_s))
            case Action.SIGKILL:
                return self._inject_signal(fault, signal.SIGKILL)
            case Action.SIGSTOP:
                return self._inject_signal(fault, signal.SIGSTOP)
            case _:
                assert_never(fault.action)

    def _inject_into_node(self, fault: Fault, inject: Callable[[str], None]) -> bool:
        if fault.target >= len(self._order):
            return False
        node, began = self._order[fault.target], time.time()
        if node in self._nodes.nodes:
            inject(node)
            self.record(f"{fault} ({node[:8]})", began)
        else:
            self.record(f"{fault} ({node[:8]}), which had already ended", began)
        return True

    def _inject_signal(self, fault: Fault, number: signal.Signals) -> bool:
        workers = self.workers()
        worker = workers[fault.target] if fault.target < len(workers) else None
        if worker is None or not is_alive(worker):
            return False
        began = time.time()
        send_signal(worker, number)
        self.record(str(fault), began)
        return True

    def record(self, description: str, began: float) -> None:
        """Record a fault: show it, and write it to the run's ledger.

        Args:
            description: Description of the fault.
            began: Time before the fault, in seconds since the epoch. The death of a node takes a moment, in which others can commit a step.
        """
        self.injected.append(InjectedFault(began, description, self._driver.step))
        self._driver.show(f"chaos: {description}")
        self._events.event(FaultEvent(description, step=max(self._driver.step, 0), time=began))

    def drain(self, node: str, deadline_s: float) -> None:
        """Give a node a notice. `kill_expired` kills it when the deadline is over."""
        self._nodes.drain(node, deadline_s)
        heapq.heappush(self._draining, (time.monotonic() + deadline_s, node))

    def kill_expired(self, now: float | None = None) -> None:
        """Kill the nodes whose deadline is over; `now` is in seconds of time.monotonic()."""
        while self._draining and self._draining[0][0] <= (now or time.monotonic()):
            _, node = heapq.heappop(self._draining)
            if node in self._nodes.nodes:
                self._nodes.kill(node)

    def workers(self) -> list[psutil.Process | None]:
        """Return the processes of the current worker group, by rank; None for a rank whose process is not known to run.

        The ledger has the process id of each rank, which may be that of another process since the rank has ended. So each is looked up
        among the processes of the rank's node. The ledger is read only if it has changed: a fault that waits for a rank asks often.
        """
        if (files := self._store.list(LEDGER)) != self._ledger_files:
            self._ledger_files, self._group = files, last_event(read_ledger(self._store).events, GroupEvent)
        workers = self._group.workers if self._group else ()
        return [self._process(worker.get("node", ""), worker.get("pid")) for worker in workers]

    def _process(self, node: str, pid: int | None) -> psutil.Process | None:
        return next((process for process in self._nodes.processes_of(node) if process.pid == pid), None)


def replay(
    chaos: Chaos,
    nodes: Nodes,
    driver: Driver,
    changes: Sequence[tuple[float, int]],
    end_s: float,
    notice_s: float,
    no_notice_share: float,
    seed: int = 0,
) -> float:
    """Add and remove nodes according to a trace.

    Args:
        chaos: Injector of faults.
        nodes: Nodes of the cluster.
        driver: Driver of the job; the replay stops when it ends.
        changes: Pairs (seconds, number of nodes) of the trace.
        end_s: Length of the replay in seconds.
        notice_s: Length in seconds of the notice before a node is removed.
        no_notice_share: Probability that a node gets no notice.
        seed: Seed for the choice of the removed nodes.

    Returns:
        The time at which the replay began, in seconds since the epoch.
    """
    chance = random.Random(seed)
    began, began_at = time.monotonic(), time.time()
    remaining = list(changes)
    removed: set[str] = set()
    while driver.process.poll() is None and time.monotonic() - began < end_s:
        if remaining and time.monotonic() - began >= remaining[0][0]:
            _, wanted = remaining.pop(0)
            staying = [node for node in nodes.nodes if node not in removed]
            for _ in range(wanted - len(staying)):
                began_change = time.time()
                chaos.record(f"{Action.ADD.sentence()} ({nodes.add()[:8]})", began_change)
            for node in chance.sample(staying, max(len(staying) - wanted, 0)):
                removed.add(node)
                began_change = time.time()
                if notice_s and chance.random() >= no_notice_share:
                    chaos.drain(node, notice_s)
                    chaos.record(Action.DRAIN.sentence(f"({node[:8]})", notice_s), began_change)
                else:
                    nodes.kill(node)
                    chaos.record(Action.KILL.sentence(f"({node[:8]})"), began_change)
        chaos.kill_expired()
        time.sleep(DECISION_INTERVAL_S)
    return began_at
