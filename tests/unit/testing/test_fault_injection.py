"""Tests of the injection of faults: into processes and nodes of this machine, without Ray."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import assert_never

import psutil
import pytest
from waiting import wait_until

from undula.errors import ClusterError
from undula.state.events import FaultEvent, GroupEvent
from undula.state.ledger import EventWriter, events_of, read_ledger
from undula.state.processes import is_alive
from undula.storage import Store
from undula.testing import chaos as module
from undula.testing.chaos import Chaos, Driver, replay
from undula.testing.faults import Action, Fault
from undula.testing.nodes import Nodes

STEPS = """
import sys, time
for step in range({steps}):
    print(f"step {{step}}/{steps} ", flush=True)
    {between}
"""
"""Script of a job that only prints its steps."""


class LocalNodes(Nodes):
    """Nodes that consist of one process each, which is also their only worker."""

    def __init__(self, count: int):
        self.nodes: list[str] = []
        self.drained: list[tuple[str, float]] = []
        self.last_change = 0.0
        """Time at which the last node began to be killed or drained, in seconds since the epoch."""
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        for _ in range(count):
            self.add()

    def add(self, num_cpus: int = 1) -> str:
        node = f"{len(self._workers):08}-node"
        self.nodes.append(node)
        self._workers[node] = self._stack.enter_context(subprocess.Popen(["sleep", "600"]))
        self._stack.callback(self._workers[node].kill)
        return node

    def kill(self, node: str) -> None:
        self.last_change = time.time()
        self.nodes.remove(node)
        self._workers[node].kill()

    def drain(self, node: str, deadline_s: float) -> None:
        self.last_change = time.time()
        self.drained.append((node, deadline_s))

    def processes_of(self, node: str) -> list[psutil.Process]:
        worker = self._workers[node]
        return [psutil.Process(worker.pid)] if worker.poll() is None else []

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def two_nodes() -> Iterator[LocalNodes]:
    nodes = LocalNodes(2)
    yield nodes
    nodes.close()


def driver_of(steps: int, between: str = "", show: Callable[[str], None] = lambda line: None) -> Driver:
    """Start a job that only prints its steps, with some code after each."""
    command = [sys.executable, "-c", STEPS.format(steps=steps, between=between)]
    return Driver(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True), show)


@pytest.fixture
def chaos(two_nodes: LocalNodes, tmp_path: Path) -> Iterator[Chaos]:
    driver = driver_of(steps=1)
    yield Chaos(two_nodes, Store(str(tmp_path)), driver)
    driver.stop()


def write_group(store: Store, nodes: LocalNodes, *of_nodes: str) -> None:
    """Write to the ledger that a group has begun to train, with one rank on each of these nodes."""
    ranks = enumerate(of_nodes)
    workers = tuple({"rank": rank, "node": node, "pid": nodes._workers[node].pid} for rank, node in ranks)
    EventWriter(store, "controller").event(GroupEvent(workers))  # type: ignore[arg-type]


def status_of(nodes: LocalNodes, node: str) -> str:
    return str(psutil.Process(nodes._workers[node].pid).status())


@pytest.mark.parametrize("action", Action)
def test_each_action_does_what_its_name_says(
    chaos: Chaos, two_nodes: LocalNodes, tmp_path: Path, action: Action
) -> None:
    store, (first, second) = Store(str(tmp_path)), two_nodes.nodes
    write_group(store, two_nodes, second, first)
    fault = Fault(action, at_step=1, target=1, deadline_s=5)
    assert chaos.inject(fault)
    match action:
        case Action.SIGKILL:
            assert two_nodes._workers[first].wait(10) == -signal.SIGKILL
        case Action.SIGSTOP:
            wait_until(lambda: status_of(two_nodes, first) == psutil.STATUS_STOPPED)
        case Action.KILL:
            assert two_nodes.nodes == [first]
        case Action.DRAIN:
            assert two_nodes.drained == [(second, 5)]
        case Action.ADD:
            assert len(two_nodes.nodes) == 3
        case _:
            assert_never(action)
    (event,) = events_of(read_ledger(store).events, FaultEvent)
    assert event.fault == chaos.injected[0].fault
    assert event.fault.startswith(str(fault))
    touched = {Action.SIGKILL: first, Action.SIGSTOP: first, Action.KILL: second}.get(action)
    others = [node for node in (first, second) if node != touched]
    assert all(is_alive(two_nodes._workers[node]) for node in others)
    assert psutil.STATUS_STOPPED not in [status_of(two_nodes, node) for node in others]


def test_a_signal_waits_for_a_group_that_has_the_rank(chaos: Chaos, two_nodes: LocalNodes, tmp_path: Path) -> None:
    store, (first, second) = Store(str(tmp_path)), two_nodes.nodes
    fault = Fault(Action.SIGKILL, at_step=1, target=1)
    assert not chaos.inject(fault)
    write_group(store, two_nodes, first)
    assert not chaos.inject(fault)
    write_group(store, two_nodes, first, second)
    assert chaos.inject(fault)
    assert [injected.fault for injected in chaos.injected] == [str(fault)]


def test_a_process_that_has_the_id_of_a_lost_rank_gets_no_signal(
    chaos: Chaos, two_nodes: LocalNodes, tmp_path: Path
) -> None:
    store, (first, second) = Store(str(tmp_path)), two_nodes.nodes
    ended = two_nodes._workers[first]
    ended.kill()
    ended.wait()
    with subprocess.Popen(["sleep", "600"]) as stranger:
        worker = {
            "rank": 0,
            "node": first,
            "pid": stranger.pid,
        }  # the id of the rank is given to a process outside of its node
        EventWriter(store, "controller").event(GroupEvent((worker,)))  # type: ignore[arg-type]
        assert not chaos.inject(Fault(Action.SIGKILL, at_step=1))
        assert is_alive(stranger)
        stranger.kill()
    write_group(store, two_nodes, second)
    two_nodes._workers[second].kill()
    wait_until(lambda: not is_alive(two_nodes._workers[second]))
    assert not chaos.inject(Fault(Action.SIGKILL, at_step=1)), "the process has ended, but was not waited for"


def test_a_fault_of_a_node_that_has_ended_is_over_and_that_of_a_future_node_waits(
    chaos: Chaos, two_nodes: LocalNodes
) -> None:
    assert not chaos.inject(Fault(Action.KILL, at_step=1, target=2))
    assert chaos.inject(Fault(Action.ADD, at_step=1))
    for expected in ("", ", which had already ended"):
        assert chaos.inject(Fault(Action.KILL, at_step=1, target=2))
        assert chaos.injected[-1].fault == f"at step 1: kill node 2 (00000002){expected}"
    assert len(two_nodes.nodes) == 2


def test_a_drained_node_is_killed_at_its_deadline(chaos: Chaos, two_nodes: LocalNodes) -> None:
    first, second = two_nodes.nodes
    chaos.drain(first, 100.0)
    chaos.drain(second, 0.0)
    chaos.kill_expired()
    assert two_nodes.nodes == [first]
    chaos.kill_expired(float("inf"))
    assert two_nodes.nodes == []


@pytest.mark.parametrize("action", [Action.KILL, Action.DRAIN])
def test_the_time_of_a_fault_is_before_it_takes_effect(chaos: Chaos, two_nodes: LocalNodes, action: Action) -> None:
    assert chaos.inject(Fault(action, at_step=1, deadline_s=5))
    assert chaos.injected[0].time <= two_nodes.last_change


@pytest.mark.parametrize("notice_s", [0.0, 5.0])
def test_the_time_of_a_change_of_a_trace_is_before_it_takes_effect(
    two_nodes: LocalNodes, tmp_path: Path, notice_s: float
) -> None:
    driver = driver_of(1, "sys.stdin.readline()")
    chaos = Chaos(two_nodes, Store(str(tmp_path)), driver)
    replay(chaos, two_nodes, driver, [(0.0, 1)], end_s=0.01, notice_s=notice_s, no_notice_share=0.0)
    driver.stop()
    (fault,) = chaos.injected
    assert fault.time <= two_nodes.last_change


def test_the_ledger_is_read_again_only_after_it_has_changed(
    chaos: Chaos, two_nodes: LocalNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (first, second) = Store(str(tmp_path)), two_nodes.nodes
    reads: list[Store] = []
    monkeypatch.setattr(module, "read_ledger", lambda store: reads.append(store) or read_ledger(store))
    write_group(store, two_nodes, first)
    for _ in range(3):
        assert not chaos.inject(Fault(Action.SIGKILL, at_step=1, target=1))
    assert len(reads) == 1
    write_group(store, two_nodes, first, second)
    assert chaos.inject(Fault(Action.SIGKILL, at_step=1, target=1))
    assert len(reads) == 2


def test_faults_are_injected_when_they_are_due(two_nodes: LocalNodes, tmp_path: Path) -> None:
    """The job waits at step 2 until the fault of that step has happened."""
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if line.startswith("chaos: at step 2"):
            assert driver.process.stdin is not None
            driver.process.stdin.write("\n")
            driver.process.stdin.flush()

    driver = driver_of(4, "if step == 2: sys.stdin.readline()", show)
    chaos = Chaos(two_nodes, Store(str(tmp_path)), driver)
    never = Fault(Action.ADD, at_step=9)
    assert chaos.run([never, Fault(Action.ADD, at_step=2), Fault(Action.KILL, at_s=0.0)], limit_s=30) == 0
    driver.stop()
    assert {injected.fault.partition(" (")[0] for injected in chaos.injected} == {
        "at step 2: add node",
        "at 0 s: kill node 0",
    }
    assert chaos.pending == [never]
    assert [line.split("/")[0] for line in shown if line.startswith("step")] == ["step 0", "step 1", "step 2", "step 3"]


def test_a_run_ends_some_steps_after_its_last_fault_however_long_its_plan_is(
    two_nodes: LocalNodes, tmp_path: Path
) -> None:
    """A fault waits for a rank that there is only after the step at which it is due, and the next one waits for it."""
    store, (first, _) = Store(str(tmp_path)), two_nodes.nodes

    def show(line: str) -> None:
        if driver.step == 20 and line.startswith("step"):
            write_group(store, two_nodes, first)

    driver = driver_of(10**9, "time.sleep(0.01)", show)
    chaos = Chaos(two_nodes, store, driver)
    faults = [Fault(Action.KILL, at_step=4, target=1), Fault(Action.ADD, at_step=2), Fault(Action.SIGKILL, at_step=3)]
    assert chaos.run(faults, limit_s=30, steps_after=5) is None
    assert chaos.pending == []
    assert [fault.fault.partition(" (")[0].partition(": ")[2] for fault in chaos.injected] == [
        "add node",
        "sigkill worker 0",
        "kill node 1",
    ]
    assert chaos.injected[-1].step >= 20
    assert driver.step >= chaos.injected[-1].step + 5
    assert is_alive(driver.process)
    driver.stop()


def test_a_job_that_does_not_end_is_reported_with_its_last_lines(two_nodes: LocalNodes, tmp_path: Path) -> None:
    driver = driver_of(1, "time.sleep(600)")
    wait_until(lambda: driver.step == 0)
    chaos = Chaos(two_nodes, Store(str(tmp_path)), driver)
    with pytest.raises(
        ClusterError, match="the job did not end within 0 s; the last lines of its output are: step 0/1"
    ):
        chaos.run([], limit_s=0.0)
    driver.stop()
    assert driver.process.returncode == -signal.SIGTERM
