"""Test of two jobs that train one run on S3 at the same time: the newer one takes over, and the older one cannot add anything."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

import torch
from numbers_job import numbers_job
from ranks import forks
from torch import nn
from waiting import wait_until

from undula.errors import SupersededError
from undula.plan.plan import PlanSpec
from undula.state.commit import find_commits
from undula.state.ledger import read_ledger
from undula.storage import open_store
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import SingleProcess

LIMIT_S = 300.0
STEPS = 40
SEEN, HAS_BEGUN, HAS_ENDED = 6, "newer has begun", "older has ended"
"""Number of steps that the older job commits alone, and files with which the jobs show each other how far they are."""


def train(run: Run, before_step: Callable[[int], None]) -> None:
    model = run.model(nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.base_lr)
    run.optimizer(optimizer)
    for step in run.steps():
        before_step(step.index)
        for batch in step.batches():
            step.backward(model(batch["x"][:, None] / 48).square().mean())
        step.update()


def train_older(job: Job, folder: Path, env: dict[str, str]) -> None:
    """Train until a newer attempt has begun, then go on until the job ends, and record with which error it does."""
    os.environ.update(env)
    torch.set_num_threads(1)

    def before_step(index: int) -> None:
        if index == SEEN:
            wait_until((folder / HAS_BEGUN).exists)

    try:
        SingleProcess(lambda run: train(run, before_step), job, lambda message: None)()
    except SupersededError as error:
        (folder / "error").write_text(str(error))
    (folder / HAS_ENDED).touch()


def train_newer(job: Job, folder: Path, env: dict[str, str]) -> None:
    """Train a few steps, wait until the older job has ended, and train to the end of the plan."""
    os.environ.update(env)
    torch.set_num_threads(1)
    begun: list[int] = []

    def before_step(index: int) -> None:
        begun.append(index)
        (folder / HAS_BEGUN).touch()
        if index == begun[0] + 3:  # one checkpoint later
            wait_until((folder / HAS_ENDED).exists)

    SingleProcess(lambda run: train(run, before_step), job, lambda message: None)()


def test_the_newer_of_two_jobs_takes_over_a_run_on_s3(s3, tmp_path: Path) -> None:
    plan = PlanSpec(global_batch=12, virtual_workers=4, epochs=STEPS // 4)
    job = replace(numbers_job(tmp_path), run_url=s3.url("run"), plan=plan)
    store = open_store(job.run_url)
    older = forks().Process(target=train_older, args=(job, tmp_path, s3.env))
    # On another machine, the newer job would find no snapshots of the older one.
    newer = forks().Process(target=train_newer, args=(replace(job, run_id=token_hex(8)), tmp_path, s3.env))
    try:
        older.start()
        wait_until(lambda: bool(find_commits(store)[0]))
        newer.start()
        for process in (older, newer):
            process.join(LIMIT_S)
            assert process.exitcode == 0
    finally:
        for process in (older, newer):
            if process.pid:
                process.kill()
    message = (tmp_path / "error").read_text()
    assert message.startswith(f"attempt 2 of {store.url} was started on ")
    ledger = read_ledger(store)
    assert ledger.steps["step"].to_pylist() == list(range(STEPS))
    attempts = ledger.steps["attempt"].to_pylist()
    assert attempts == sorted(attempts)
    assert attempts[0] == 1
    assert attempts[SEEN] == 2
    commits, damaged = find_commits(store)
    assert not damaged
    assert commits[0].step == STEPS
    assert [commit.attempt for commit in commits] == [2, 2]
    assert [commit.damage(store, sorted(commit.files)) for commit in commits] == [None, None]
    folders = {entry.name.split("/")[1] for entry in store.list("checkpoints")}
    assert folders == {commit.folder.split("/")[1] for commit in commits}
