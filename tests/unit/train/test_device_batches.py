"""Tests of micro-batches that are read before they are needed: they change no sample, and count only once they are consumed."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_job import cpu_run, numbers_job
from ranks import on_ranks
from torch import nn

from undula.plan.plan import MicroBatch
from undula.recovery.worker_state import WorkerState
from undula.state.ledger import Ledger, read_ledger
from undula.storage import Store
from undula.train import micro_batches
from undula.train.device_batches import DeviceBatches
from undula.train.job import Job


def trained(
    rank: int, world_size: int, job: Job, reads_ahead: bool, steps: int | None = None, worker: WorkerState | None = None
) -> None:
    micro_batches.DeviceBatches = partial(DeviceBatches, reads_ahead=reads_ahead)  # type: ignore[misc,assignment]
    run = cpu_run(job, rank, world_size, worker)
    model = run.model(nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    for step in run.steps():
        for batch in step.batches():
            step.backward((model(batch["x"][:, None] / 48) - 1).square().mean())
        step.update()
        if step.index + 1 == steps:
            run.hand_over()
            return


def ledger_of(job: Job) -> Ledger:
    return read_ledger(Store(job.run_url))


@pytest.mark.parametrize(
    ("world_size", "plan"),
    [
        (1, {"micro_batch": 2, "epochs": 2}),
        (3, {"global_batch": 16, "virtual_workers": 4, "micro_batch": 3, "max_steps": 7, "epochs": 3}),
        (2, {"global_batch": 20, "virtual_workers": 4, "epochs": 2}),  # the last step of an epoch is short
        (2, {"global_batch": 8, "virtual_workers": 4, "epochs": 2, "batch": "elastic"}),
    ],
)
def test_reading_ahead_changes_no_sample_and_no_loss(tmp_path: Path, world_size: int, plan: dict[str, Any]) -> None:
    job = numbers_job(tmp_path, **plan)
    found = []
    for reads_ahead in (False, True):
        its_own = replace(job, run_url=f"{tmp_path}/{reads_ahead}")
        on_ranks(world_size, trained, its_own, reads_ahead)
        steps = ledger_of(its_own).steps
        found.append([steps[name].to_pylist() for name in ("sample_digest", "loss", "step_samples")])
        assert set(steps["transfer_s"].to_pylist()) == {0.0}  # a CPU has nothing to transfer
    assert found[0] == found[1]


@pytest.mark.usefixtures("process_group")
def test_what_was_only_read_ahead_is_consumed_by_the_next_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(micro_batches, "DeviceBatches", DeviceBatches)
    job = numbers_job(tmp_path, epochs=2)
    whole = replace(job, run_url=f"{tmp_path}/whole", run_id="whole")
    trained(0, 1, whole, reads_ahead=False)
    worker = WorkerState()
    trained(0, 1, job, True, steps=3, worker=worker)
    trained(0, 1, job, True, worker=worker)
    digests = ledger_of(whole).steps["sample_digest"].to_pylist()
    assert ledger_of(job).steps["sample_digest"].to_pylist() == digests


class FailingStream:
    """Stream of which a read fails."""

    def take(self, virtual_worker: int, count: int) -> None:
        raise OSError("the disk is gone")


def test_an_error_of_reading_ahead_is_raised_when_the_samples_are_needed() -> None:
    batches = DeviceBatches(FailingStream(), torch.device("cpu"), reads_ahead=True)  # type: ignore[arg-type]
    batches.begin_next(MicroBatch(0, 0, 0, 2))
    with pytest.raises(OSError, match="the disk is gone"):
        batches.take(MicroBatch(0, 0, 0, 2))
