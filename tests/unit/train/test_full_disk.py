"""Test of a disk that is full for some steps: checkpoints fail meanwhile, and training goes on."""

import resource
from dataclasses import replace
from pathlib import Path

import torch
from numbers_job import numbers_job, run_batches
from ranks import forks
from torch import nn
from waiting import wait_until

from undula.state.commit import find_commits
from undula.state.events import WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import open_store
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
