"""A job on a cluster of several nodes of this machine, to which a schedule of faults happens."""

import heapq
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

import psutil

from undula.cluster.local import LocalCluster
from undula.errors import ClusterError
from undula.state.ledger import EventWriter, last_event, read_ledger
from undula.state.records import Event
from undula.storage import Store
from undula.testing.faults import Fault
from undula.testing.nodes import Nodes

LOOK_S = 0.05
STOP_TIMEOUT_S = 30.0
_STEP = re.compile(r"^step +(\d+)/(\d+) ")


@dataclass(frozen=True)
class Done:
    """A fault that has happened."""

    time: float
    """Seconds since the epoch."""
    fault: str
    """In words."""
    step: int
    """Steps committed by then, as the job's last line said."""


@dataclass
class Driver:
    """A job's driver in a process of its own, whose lines are read as they come."""

    process: "subprocess.Popen[str]"
    show: Callable[[str], None]
    step: int = -1
    """Steps committed, as its last line said; -1 before the first."""
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
        """End the job, where it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
            self.process.kill()
        self._reader.join(timeout=5)


def start_driver(
    command: Sequence[str], cluster: LocalCluster, show: Callable[[str], None], folder: Path | None = None
) -> Driver:
    """Start a job's script on a cluster."""
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
    """Carries out faults on a cluster while a job runs there.

    Args:
        nodes: the cluster.
        store: the run directory, which tells what process a rank is.
        driver: the job.
    """

    def __init__(self, nodes: Nodes, store: Store, driver: Driver):
        self._nodes = nodes
        self._store = store
        self._driver = driver
        self._order = list(nodes.nodes)
        self._dooms: list[tuple[float, str]] = []
        self._events = EventWriter(store, "chaos")
        self.done: list[Done] = []
        self.left: list[Fault] = []
        """Faults that have not happened."""

    def run(self, faults: Sequence[Fault], limit_s: float) -> int:
        """Let the faults happen as the job gets to them, to the end of the job; its exit status."""
        began = time.monotonic()
        first_step: float | None = None
        self.left = list(faults)
        while self._driver.process.poll() is None:
            now = time.monotonic()
            if now - began > limit_s:
                raise ClusterError(f"the job did not end within {limit_s:.0f} s: {' | '.join(self._driver.lines[-5:])}")
            if first_step is None and self._driver.step >= 0:
                first_step = now
            if first_step is not None:
                due = [fault for fault in self.left if fault.is_due(self._driver.step, now - first_step)]
                for fault in due:
                    if self.carry_out(fault):
                        self.left.remove(fault)
            self.keep_dooms()
            time.sleep(LOOK_S)  # paces the looks
        self.keep_dooms(float("inf"))  # Ray ends such a node in its own time, and nobody would know
        return self._driver.process.returncode

    def carry_out(self, fault: Fault) -> bool:
        """Let one fault happen; False where it must wait, as the group has no such rank now."""
        what = str(fault)
        if fault.action == "add":
            self._order.append(self._nodes.add())
            what += f" ({self._order[-1][:8]})"
        elif fault.action in ("sigkill", "sigstop"):
            number = signal.SIGKILL if fault.action == "sigkill" else signal.SIGSTOP
            pids = self.worker_pids()
            if fault.target >= len(pids) or not psutil.pid_exists(pids[fault.target]):
                return False
            os.kill(pids[fault.target], number)
        elif fault.target >= len(self._order):
            return False
        elif (node := self._order[fault.target]) in self._nodes.nodes:
            what += f" ({node[:8]})"
            if fault.action == "kill":
                self._nodes.kill(node)
            else:
                self.drain(node, fault.deadline_s)
        else:
            what += f" ({node[:8]}), which is gone already"
        self.tell(what)
        return True

    def tell(self, what: str) -> None:
        """Something has happened to the cluster: for who looks on, and in the run's ledger."""
        self.done.append(Done(time.time(), what, self._driver.step))
        self._driver.show(f"chaos: {what}")
        self._events.event(Event("fault", what, max(self._driver.step, 0)))

    def drain(self, node: str, deadline_s: float) -> None:
        """A notice, and its end when the time is over."""
        self._nodes.drain(node, deadline_s)
        heapq.heappush(self._dooms, (time.monotonic() + deadline_s, node))

    def keep_dooms(self, now: float | None = None) -> None:
        """Kill the nodes whose notice is over."""
        while self._dooms and self._dooms[0][0] <= (now or time.monotonic()):
            _, node = heapq.heappop(self._dooms)
            if node in self._nodes.nodes:
                self._nodes.kill(node)

    def worker_pids(self) -> list[int]:
        """The processes of the group that trains now, by rank."""
        group = last_event(read_ledger(self._store).events, "group")
        return [worker["pid"] for worker in group["data"]["workers"]] if group else []


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
    """Make nodes come and go as a trace says, until `end_s`; the seconds since the epoch at which it began.

    A node that goes has had a notice of `notice_s`, or none with a probability of `no_notice_share`.
    """
    chance = random.Random(seed)
    began, began_at = time.monotonic(), time.time()
    left = list(changes)
    going: set[str] = set()
    while driver.process.poll() is None and time.monotonic() - began < end_s:
        if left and time.monotonic() - began >= left[0][0]:
            _, wanted = left.pop(0)
            staying = [node for node in nodes.nodes if node not in going]
            for _ in range(wanted - len(staying)):
                chaos.tell(f"add node ({nodes.add()[:8]})")
            for node in chance.sample(staying, max(len(staying) - wanted, 0)):
                going.add(node)
                if notice_s and chance.random() >= no_notice_share:
                    chaos.drain(node, notice_s)
                    chaos.tell(f"drain node ({node[:8]}) deadline {notice_s:g}")
                else:
                    nodes.kill(node)
                    chaos.tell(f"kill node ({node[:8]})")
        chaos.keep_dooms()
        time.sleep(LOOK_S)  # paces the looks
    return began_at
