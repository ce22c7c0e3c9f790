"""Tests of the worker actor: leaving a group, killing processes, and measuring the memory of its own."""

import functools
import mmap
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.train.v2._internal.execution.worker_group import worker as rays_worker
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker
from ray.train.v2.api.preemption import PreemptionInfo

from undula.elastic.ray import actor
from undula.elastic.ray.actor import ElasticWorker, WorkerMetadata, rehearse_steps, resident_memory
from undula.elastic.ray.pool import _that_see
from undula.elastic.ray.pooled_worker import PooledWorker
from undula.recovery.progress import HAND_OVER
from undula.recovery.worker_state import WorkerState
from undula.state.processes import ProcessIdentity, identity_of


@contextmanager
def other_worker() -> "Iterator[subprocess.Popen[bytes]]":
    """Process with the title of a worker, which waits for the end of its input."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "ray::ElasticWorker.poll_status"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_worker_kills_another_worker_but_no_process_that_reuses_its_id() -> None:
    worker = ElasticWorker.__new__(ElasticWorker)
    with other_worker() as other:
        lost = identity_of(other)
        worker.kill_process(lost)
        assert other.wait(10) == -9
        worker.kill_process(lost)  # the process has ended
    with other_worker() as healthy:
        its = identity_of(healthy)
        worker.kill_process(replace(its, started=its.started - 1))  # that worker has ended, and this one has its id
        worker.kill_process(replace(its, namespace=f"{its.namespace}0"))  # that worker is in another container
        assert healthy.stdin is not None
        healthy.stdin.close()
        assert healthy.wait(10) == 0


def test_a_notice_is_stored_without_a_line_of_rays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context = SimpleNamespace(preemption_context=SimpleNamespace(preemption_info=None), get_world_rank=lambda: 0)
    for module in (actor, rays_worker):
        monkeypatch.setattr(module, "get_train_context", lambda: context)
    notice = PreemptionInfo(5_000, {"a": [0]})
    with caplog.at_level("INFO"):
        ElasticWorker.__new__(ElasticWorker).mark_preempt(notice)
    assert context.preemption_context.preemption_info is notice
    assert not caplog.records


def worker_in(namespace: str, pid: int) -> PooledWorker:
    """Worker on a machine whose containers share its hostname."""
    process = ProcessIdentity(namespace, pid, started=pid)
    metadata = WorkerMetadata("host", "node", "10.0.0.1", pid, {}, process)
    return PooledWorker(actor=None, node="node", preparing=None, started=0.0, metadata=metadata)


def test_a_lost_worker_is_killed_by_all_workers_that_see_it_and_by_no_other() -> None:
    near, nearer, far = worker_in("boot pid:[1]", 5), worker_in("boot pid:[1]", 6), worker_in("boot pid:[2]", 7)
    starting = PooledWorker(actor=None, node="node", preparing=None, started=0.0)
    lost = worker_in("boot pid:[1]", 214).metadata
    assert lost is not None
    assert _that_see(lost, [far, near, starting, nearer]) == [near, nearer]
    unknown = worker_in("", 214).metadata
    assert unknown is not None
    assert _that_see(unknown, [worker_in("", 5)]) == []


def test_resident_memory_grows_with_what_the_process_writes_to() -> None:
    before = resident_memory()
    with mmap.mmap(-1, 64 * 2**20) as block:  # malloc may have memory that is resident already
        block.write(b"1" * len(block))
        assert before + 60 * 2**20 < resident_memory() < before + 192 * 2**20


@contextmanager
def leaving(
    monkeypatch: pytest.MonkeyPatch, hand_over: Callable[[WorkerState, threading.Event], None]
) -> Iterator[ElasticWorker]:
    """Worker whose train function hands its state over, after its group has ended because of another rank."""
    state, is_over = WorkerState(), threading.Event()
    state.is_sound = True
    thread = threading.Thread(target=hand_over, args=(state, is_over), daemon=True)
    thread.start()
    runner = SimpleNamespace(_thread=thread, get_error=lambda: RuntimeError("a collective failed"))
    context = SimpleNamespace(execution_context=SimpleNamespace(training_thread_runner=runner))
    monkeypatch.setattr(actor, "get_train_context", lambda: context)
    monkeypatch.setattr(actor, "abort_collectives", lambda state: None)
    monkeypatch.setattr(ElasticWorker, "shutdown", lambda self: None)
    worker = ElasticWorker.__new__(ElasticWorker)
    worker._state = state
    yield worker
    is_over.set()
    thread.join()


def test_a_worker_may_take_long_to_leave_as_long_as_it_copies_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def hand_over(state: WorkerState, is_over: threading.Event) -> None:
        while not is_over.wait(0.05):
            state.progress.enter(HAND_OVER)

    with leaving(monkeypatch, hand_over) as worker:
        assert [worker.leave_group(0.5) for _ in range(3)] == ["busy"] * 3
    assert worker.leave_group(0.5) == "left"


def test_the_time_to_leave_follows_the_bytes_that_a_worker_still_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def hand_over(state: WorkerState, is_over: threading.Event) -> None:
        state.progress.enter(HAND_OVER, allowed_s=60.0)
        is_over.wait()

    with leaving(monkeypatch, hand_over) as worker:
        assert [worker.leave_group(0.2) for _ in range(3)] == ["busy"] * 3


def test_a_failure_is_reported_while_the_collectives_are_still_being_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def hand_over(state: WorkerState, is_over: threading.Event) -> None:
        state.is_run, state.failure = True, OSError("the disk is full")
        is_over.wait()

    monkeypatch.setattr(RayTrainWorker, "poll_status", lambda self: WorkerStatus(running=True))
    with leaving(monkeypatch, hand_over) as worker:
        status = worker.poll_status()
        assert status.running
        assert "the disk is full" in str(WorkerGroupPollStatus({0: status}).errors[0])
        worker._state.is_sound = False
        assert worker.leave_group(600) == "unusable"  # without waiting for the end of the train function


def test_a_worker_that_makes_no_progress_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    def hand_over(state: WorkerState, is_over: threading.Event) -> None:
        state.progress.enter(HAND_OVER)
        is_over.wait()

    with leaving(monkeypatch, hand_over) as worker:
        assert worker.leave_group(0.5) == "unusable"


def test_a_worker_whose_script_cannot_be_executed_again_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    executions: list[int] = []

    def execute() -> None:
        executions.append(1)
        if len(executions) > 1:
            raise ValueError("'net' is registered already")

    with leaving(monkeypatch, lambda state, is_over: None) as worker:
        worker._execute_script = execute
        assert [worker.leave_group(1.0), worker.leave_group(1.0)] == ["left", "unusable"]


class Lost:
    """Reference to a train function that cannot be fetched any more."""

    def get(self) -> None:
        raise AssertionError("the train function is fetched again")


def test_each_group_gets_a_copy_of_the_train_function_without_fetching_it(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []
    monkeypatch.setattr(RayTrainWorker, "run_train_fn", lambda self, reference: received.append(reference.get()))
    worker = ElasticWorker.__new__(ElasticWorker)
    calls: list[int] = []
    worker._keep(lambda: calls.append(1) or len(calls))
    for _ in range(2):
        worker.run_train_fn(Lost())
    assert [function() for function in received] == [1, 1]  # neither sees what the other has done


def test_each_group_gets_a_rehearsed_train_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has compiled the code of its classes, and would compile that of a copy again."""
    received: list[Any] = []
    monkeypatch.setattr(RayTrainWorker, "run_train_fn", lambda self, reference: received.append(reference.get()))
    worker, rehearsed = ElasticWorker.__new__(ElasticWorker), []

    class Trainer:
        def __call__(self) -> None: ...

        def rehearse(self, device: torch.device) -> bool:
            rehearsed.append(device)
            return True

    train_fn = functools.wraps(Trainer())(lambda: None)  # as Ray wraps the function of a trainer
    monkeypatch.setattr("undula.elastic.ray.actor.reserved_device", lambda: torch.device("cpu"))
    worker._keep(train_fn, rehearse_steps(train_fn))
    worker.run_train_fn(Lost())
    assert received == [train_fn]
    assert rehearsed == [torch.device("cpu")]


def test_a_train_function_that_cannot_be_pickled_is_fetched_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []
    monkeypatch.setattr(RayTrainWorker, "run_train_fn", lambda self, reference: received.append(reference))
    worker = ElasticWorker.__new__(ElasticWorker)
    lock = threading.Lock()
    worker._keep(lambda: lock.locked())
    reference = Lost()
    worker.run_train_fn(reference)
    assert received == [reference]
