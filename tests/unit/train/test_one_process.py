"""Test of a process that goes through many worker groups alone: it holds no more descriptors, threads and snapshots after each."""

import gc
import shutil
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from numbers_job import cpu_run, numbers_job, run_batches

from undula.recovery.snapshot import folder_of
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state.spec import CheckpointSpec
from undula.train.run import Run
from undula.train.single_process import local_world


class LostRankError(Exception):
    """Stands for the error of a collective that another rank has left."""


def train(run: Run, worker: WorkerState, is_lost: bool) -> None:
    """Train three steps. Then leave the group, or lose the third step together with another rank."""
    model = run.model(torch.nn.Linear(1, 1))
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
    for number, step in enumerate(run.steps()):
        run_batches(step, model)
        if number == 2 and is_lost:
            raise LostRankError
        worker.request = Request(leaves=number == 2)
        step.update()


def held(memory: Path) -> tuple[int, int, int]:
    """Return the descriptors and threads of this process, and the bytes of its snapshots."""
    files = [file.stat().st_size for file in memory.rglob("data*")]
    return psutil.Process().num_fds(), psutil.Process().num_threads(), sum(files)


def test_descriptors_threads_and_snapshots_stay_the_same_over_many_groups(tmp_path: Path) -> None:
    checkpoint = CheckpointSpec(every_steps=10**6, snapshot_every_steps=1)
    job = replace(numbers_job(tmp_path, epochs=100), checkpoint=checkpoint)
    memory = folder_of(job.run_url, job.run_id)
    worker = WorkerState(is_run=True, controller=object())
    most = (0, 0, 0)
    for group in range(9):
        with local_world(torch.device("cpu")):
            worker.join_group()
            run = cpu_run(job, worker=worker)
            with pytest.raises((LeaveGroup, LostRankError)):
                train(run, worker, is_lost=group % 2 == 1)
            run.hand_over()
            run.free()
        del run
        gc.collect()  # as ElasticWorker does before each group
        if group < 3:
            most = tuple(map(max, most, held(memory)))
    deadline = time.monotonic() + 30.0
    while any(now > limit for now, limit in zip(held(memory), most, strict=True)):
        assert time.monotonic() < deadline, (held(memory), most)
        time.sleep(0.05)  # threads that close the streams of a group end later
    assert worker.held is not None
    assert worker.held.step == 3 * 5 + 2 * 4
    shutil.rmtree(memory)
