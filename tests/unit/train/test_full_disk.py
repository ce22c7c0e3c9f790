"""Tests of a disk that is full for a while: checkpoints fail meanwhile, and training goes on."""

import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_job import cpu_run, numbers_job, run_batches
from ranks import forks
from torch import nn
from waiting import wait_until

from undula.errors import StorageError
from undula.recovery.worker_state import WORKER_MEMORY, LeaveGroup, Request, WorkerState
from undula.state import checkpoint
from undula.state.commit import find_commits
from undula.state.events import StartEvent, WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store, open_store
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import SingleProcess

STEPS = 12
FULL = range(4, 8)
"""Indices of the steps during which no file can be larger than LIMIT, which is less than a checkpoint takes."""
LIMIT = 32 * 1024


def train_with_full_disk(job: Job) -> None:
    def train(run: Run) -> None:
        model = run.model(nn.Linear(1, 2 * LIMIT))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
        for step in run.steps():
            if step.index in (FULL.start, FULL.stop):
                checkpoints = step._boundary._saver.checkpoints
                wait_until(lambda of=checkpoints: of.saving_step is None or of.has_finished_here)
            limit = LIMIT if step.index in FULL else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            run_batches(step, model)
            step.update()

    torch.set_num_threads(1)
    SingleProcess(train, job, lambda message: None)()


def test_a_full_disk_fails_checkpoints_but_not_training(tmp_path: Path) -> None:
    """Checkpoints are due after 3, 6, 9 and 12 steps, and each is written during the steps that follow it."""
    job = numbers_job(tmp_path, epochs=3)
    job = replace(job, checkpoint=replace(job.checkpoint, every_steps=3, keep=10))
    process = forks().Process(target=train_with_full_disk, args=(job,))
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0
    store = open_store(job.run_url)
    assert sorted(commit.step for commit in find_commits(store)[0]) == [3, 9, 12]
    ledger = read_ledger(store)
    assert ledger.steps["step"].to_pylist() == list(range(STEPS))
    assert [warning.code for warning in events_of(ledger.events, WarningEvent)] == ["checkpoint_failed"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Folder on a file system with room for one checkpoint of `train_wide`, but not for two."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1280k", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def train_wide(job: Job) -> None:
    def train(run: Run) -> None:
        model = run.model(nn.Linear(1, 3 * LIMIT))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
        for step in run.steps():
            run_batches(step, model)
            step.update()
            wait_until(lambda of=step._boundary._saver.checkpoints: of.saving_step is None or of.has_finished_here)

    torch.set_num_threads(1)
    SingleProcess(train, job, lambda message: None)()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")
def test_a_full_disk_is_named_once_and_the_last_checkpoint_waits_for_room(tmp_path: Path, small_disk: Path) -> None:
    """Checkpoints of 786 kB are due after 3, 6, 9 and 12 steps. Only the first one has room, until the last one has failed."""
    job = numbers_job(tmp_path, epochs=3)
    job = replace(job, run_url=f"{small_disk}/run", checkpoint=replace(job.checkpoint, every_steps=3, keep=1))
    store = open_store(job.run_url)

    def warnings() -> list[WarningEvent]:
        return events_of(read_ledger(store).events, WarningEvent)

    process = forks().Process(target=train_wide, args=(job,))
    process.start()
    try:
        wait_until(lambda: warnings() and warnings()[-1].code == "last_checkpoint_failed")
        subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
        process.join(120)
    finally:
        process.kill()
    assert process.exitcode == 0
    assert [warning.code for warning in warnings()] == ["no_room", "checkpoint_failed", "last_checkpoint_failed"]
    room, first, last = (warning.message for warning in warnings())
    assert f"up to 2 checkpoints of 786.4 kB at a time, and {store.url} has 1.3 MB free" in room
    lacking = (
        rf"it needs 786.4 kB, and {store.url} has \d+\.\d kB free; the newest checkpoint is that of step 3; make room"
    )
    assert re.search(f"{lacking} or correct this: the run tries again every 3 steps", first)
    assert re.search(f"{lacking} or correct this: the run tries again for 30 minutes", last)
    assert [entry.name for entry in (small_disk / "run/checkpoints").iterdir()] == ["step-00000012-a1"]


@pytest.mark.usefixtures("process_group")
def test_a_group_that_waits_for_the_storage_at_its_end_can_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage fails until the ranks are asked to leave; the next group of the process then saves the final state."""
    job, worker, begun = numbers_job(tmp_path), WorkerState(), []
    write = checkpoint.write_share

    def failing(store: Store, folder: str, *arguments: Any) -> Any:
        if checkpoint.step_of(folder) == 4 and not begun[1:]:
            worker.request = Request(leaves=True)
            raise StorageError("no answer")
        return write(store, folder, *arguments)

    monkeypatch.setattr(checkpoint, "write_share", failing)
    for _ in range(2):
        begun.append(True)
        run = cpu_run(job, worker=worker)
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
        with suppress(LeaveGroup):
            for step in run.steps():
                run_batches(step, model)
                step.update()
            assert begun[1:], "the first group leaves"
        run.hand_over()
        worker.request = Request()
    store = open_store(job.run_url)
    assert find_commits(store)[0][0].step == 4
    starts = events_of(read_ledger(store).events, StartEvent)
    assert [(start.step, start.origin) for start in starts] == [(0, None), (4, WORKER_MEMORY)]
