"""Tests of the boundary between two steps: checkpoints that take long, ranks that leave meanwhile, and the state that they hand over."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from numbers_job import cpu_run, leave_after_next, numbers_job, trained

from undula.recovery.progress import HAND_OVER
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state import checkpoint
from undula.state.commit import find_commits
from undula.state.pieces import RankState
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train.attempt import Attempt
from undula.train.boundary import StepBoundary
from undula.train.job import Job
from undula.train.run import Run
from undula.train.script_state import ScriptState

pytestmark = pytest.mark.usefixtures("process_group")


class SlowStorage:
    """Storage that writes a checkpoint only when the test lets it."""

    def __init__(self) -> None:
        self.begun = 0
        """Number of checkpoints whose writing has begun."""
        self._writes = checkpoint.write_share
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def write_share(self, *arguments: Any) -> Any:
        self.begun += 1
        assert self._is_open or self._permits.acquire(timeout=20)
        return self._writes(*arguments)

    def write_one(self) -> None:
        """Let the checkpoint be written whose turn it is, and wait until it has been."""
        self._permits.release()
        for thread in threading.enumerate():
            if thread.name.startswith("undula-checkpoint"):
                thread.join(20)

    def open(self) -> None:
        """Let all further checkpoints be written at once."""
        self._is_open = True
        self._permits.release()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStorage]:
    slow = SlowStorage()
    monkeypatch.setattr(checkpoint, "write_share", slow.write_share)
    yield slow
    slow.open()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Job of 12 steps, with a checkpoint due after every second one."""
    return replace(numbers_job(tmp_path, epochs=3), checkpoint=CheckpointSpec(every_steps=2, keep=9))


def steps_of(job: Job, worker: WorkerState) -> Iterator[tuple[Run, int]]:
    """Train, and yield the number of committed steps at the end of each."""
    run = cpu_run(job, worker=worker)
    for step in trained(run):
        yield run, step.index + 1


def test_a_rank_that_hands_its_state_over_reports_each_part_that_it_copies(
    job: Job, storage: SlowStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, seen = WorkerState(), []
    on_host = RankState.on_host

    def on_host_in_two_parts(state: RankState, copied: Callable[[], None]) -> RankState:
        for _ in range(2):
            time.sleep(0.1)
            copied()
            seen.append(worker.progress.view())
        return on_host(state, copied)

    monkeypatch.setattr(RankState, "on_host", on_host_in_two_parts)
    run, _ = next(steps := steps_of(job, worker))
    leave_after_next(steps, worker)
    run.hand_over()
    assert [view.phase for view in seen] == [HAND_OVER] * 2
    assert all(view.phase_s < 0.1 for view in seen)
    assert worker.held is not None
    steps.close()


def saved(job: Job) -> list[int]:
    return sorted(commit.step for commit in find_commits(Store(job.run_url))[0])


def test_a_checkpoint_that_outlasts_its_interval_does_not_block_the_training(job: Job, storage: SlowStorage) -> None:
    """Two checkpoints become due while that of step 2 is being written. One begins as soon as it has ended."""
    for _, done in steps_of(job, WorkerState()):
        if done == 7:
            assert storage.begun == 1
            storage.write_one()
        if done == 9:
            assert storage.begun == 2
            storage.open()
    assert saved(job)[:2] == [2, 8]
    assert saved(job)[-1] == 12


def test_ranks_that_were_asked_to_leave_begin_no_checkpoint_and_the_next_group_does(
    job: Job, storage: SlowStorage
) -> None:
    worker, reached = WorkerState(), 0
    with suppress(LeaveGroup):
        for run, done in steps_of(job, worker):
            reached, former = done, run
            if done == 3:
                worker.request = Request(leaves=True)
            if done == 5:
                storage.write_one()
    assert (reached, storage.begun) == (6, 1)
    former.hand_over()
    storage.open()
    worker.join_group()
    next(steps := steps_of(job, worker))
    next(steps)
    assert storage.begun == 2
    steps.close()
    storage.write_one()
    assert saved(job) == [2, 7]


def test_ranks_that_were_asked_to_save_and_leave_do_both_at_once(job: Job, storage: SlowStorage) -> None:
    worker, reached = WorkerState(), 0
    with suppress(LeaveGroup):
        for _, done in steps_of(job, worker):
            reached = done
            if done == 3:
                storage.open()
                worker.request = Request(leaves=True, saves=True)
    assert reached == 4
    assert saved(job) == [2, 4]


@pytest.mark.parametrize(("until", "left", "checkpoints"), [(0.0, 6, []), (math.inf, 7, [5])])
def test_leaving_waits_for_a_checkpoint_that_is_being_written_until_its_deadline(
    job: Job, storage: SlowStorage, until: float, left: int, checkpoints: list[int]
) -> None:
    """The group is asked to leave while the checkpoint of step 5 is being written, which ends after step 6."""
    worker = WorkerState()
    with suppress(LeaveGroup):
        for former, done in steps_of(replace(job, checkpoint=CheckpointSpec(every_steps=5)), worker):
            run = former
            if done == 5:
                worker.request = Request(leaves=True, until=until)
            if done == 6 and until:
                storage.write_one()
    run.hand_over()
    storage.open()
    assert worker.held is not None
    assert worker.held.step == left
    storage.write_one()
    assert saved(job) == checkpoints


class FullNode:
    """Snapshots of a rank whose node has no memory for the one in progress, which only `wait` finds out."""

    lacks_piece = is_sending = False

    def wait(self) -> None:
        self.lacks_piece = True

    def wants(self, step_s: float, always: bool) -> tuple[bool, bool]:
        return True, False


def test_the_ranks_agree_on_a_step_only_after_each_has_stored_the_last_snapshot() -> None:
    """Otherwise a fast rank could replace the last complete state while a slow one has not stored the newer one yet."""
    layout = SimpleNamespace(control=dist.group.WORLD)
    setup: Any = SimpleNamespace(worker=WorkerState(), layout=layout)
    checkpoints = SimpleNamespace(has_finished_here=False)
    saver: Any = SimpleNamespace(snapshots=FullNode(), checkpoints=checkpoints, updates=None)
    wants = StepBoundary(setup, Any, ScriptState(), Attempt(setup), saver)._wants()  # type: ignore[arg-type]
    assert wants.snapshots
    assert wants.lacks_memory
