"""Test of commands on a run on S3 while it trains, dies and resumes: at any moment they see a whole run."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from numbers_job import numbers_job
from poller import polled
from ranks import forks
from s3_server import S3Proxy, Takes, serving
from torch import nn
from waiting import wait_until

from undula.config.job import as_tree
from undula.data.prepare.write import write_shards
from undula.data.spec import DataSpec
from undula.data.stored.mixture import load_data
from undula.plan.plan import Plan, PlanSpec
from undula.state import ledger
from undula.state.ledger_files import file_names
from undula.state.spec import CheckpointSpec
from undula.storage import Store, open_store
from undula.storage.s3 import forget_clients
from undula.storage.s3_requests import forget_forms
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import SingleProcess

LIMIT_S = 300.0
POLLED = 5
"""Minimum number of polls of each command while an attempt trains."""


def write_job(s3: Any, folder: Path) -> Job:
    """Write a data set to S3 and the record of a job that trains on it far longer than the test."""
    rows = 12 * 2000
    table = pa.table({"x": np.arange(rows, dtype=np.float32)})
    write_shards(open_store(s3.url("data")), [table], table.schema, rows, num_shards=2)
    plan = PlanSpec(global_batch=12, virtual_workers=4, epochs=1)
    job = replace(
        numbers_job(folder),
        run_url=s3.url("runs/polled"),
        data=DataSpec(train=s3.url("data")),
        plan=plan,
        checkpoint=CheckpointSpec(every_steps=20),
    )
    data = load_data(job.data)
    whole = Plan(job.plan, data.num_rows)
    spec = {"plan": as_tree(job.plan), "data": as_tree(job.data), "deterministic": job.deterministic}
    record = {
        "name": job.name,
        "plan_digest": whole.digest(data.digest),
        "spec": spec,
        "total_steps": whole.total_steps,
    }
    open_store(job.run_url).write("job.json", json.dumps(record).encode())
    return job


def train(job: Job, env: dict[str, str]) -> None:
    """Train until this process is killed. The ledger's files are written and merged far more often than in a run of days."""
    os.environ.update(env)
    torch.set_num_threads(1)
    ledger.FLUSH_INTERVAL_S = 0.02
    ledger.FILES_PER_TIER = 4

    def loop(run: Run) -> None:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
        for step in run.steps():
            for batch in step.batches():
                step.backward(model(batch["x"][:, None] / 24_000).square().mean())
            step.update()
            time.sleep(0.05)  # so the data lasts for longer than the test

    SingleProcess(loop, job, lambda message: None)()


@contextmanager
def training(job: Job, env: dict[str, str]) -> Iterator[None]:
    process = forks().Process(target=train, args=(job, env))
    process.start()
    try:
        yield
        assert process.is_alive()
    finally:
        process.kill()
        process.join()


@contextmanager
def server_for(s3_endpoint: str, takes: str) -> Iterator[str]:
    """Yield the URL of an S3 server that takes ETags in any form, or only in one."""
    if takes == "any":
        yield s3_endpoint
    else:
        with serving(S3Proxy(s3_endpoint, cast(Takes, takes))) as server:
            yield server.url


def merges(store: Store) -> int:
    """Return how often files with steps were merged."""
    numbers = [int(name.split("-")[2]) for name in file_names(store) if name.startswith("steps-merged-")]
    return max(numbers, default=0)


STRICT = [pytest.param(takes, False, marks=pytest.mark.nightly) for takes in ("quoted", "bare")]


@pytest.mark.parametrize(("takes", "resumes"), [("any", True), *STRICT])
def test_a_run_on_s3_is_whole_whenever_somebody_looks(
    s3, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, takes: str, resumes: bool
) -> None:
    with server_for(s3_endpoint, takes) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        forget_clients()
        forget_forms()
        env = {**s3.env, "AWS_ENDPOINT_URL": url}
        job = write_job(s3, tmp_path)
        store = open_store(job.run_url)
        with training(job, env):
            wait_until(lambda: any(name.startswith("steps-") for name in file_names(store)))
            with polled(s3.url("runs"), "polled", env) as polls:
                wait_until(lambda: polls.refresh().least >= POLLED and merges(store) >= 2)
        if not resumes:
            return
        before, steps = merges(store), polls.steps
        with polled(s3.url("runs"), "polled", env) as polls, training(job, env):
            wait_until(lambda: polls.refresh().attempts == 2 and polls.steps > steps)
            wait_until(lambda: merges(store) > before)
