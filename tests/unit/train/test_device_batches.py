"""Tests of micro-batches that are read before they are needed: they change no sample, and count only once they are consumed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from features import train_in_groups
from numbers_job import numbers_job
from ranks import on_ranks

from undula.plan.plan import MicroBatch
from undula.state.ledger import read_ledger
from undula.storage import Store
from undula.train.job import Job
from undula.train.micro_batches import DeviceBatches


def _train(rank: int, world_size: int, job: Job, reads_ahead: bool) -> None:
    train_in_groups(rank, world_size, {"plain": job}, reads_ahead=reads_ahead)


def test_reading_ahead_changes_no_sample_and_no_loss_of_elastic_batches(tmp_path: Path) -> None:
    job = numbers_job(tmp_path, global_batch=8, epochs=2, batch="elastic")
    found = []
    for reads_ahead in (False, True):
        its_own = replace(job, run_url=f"{tmp_path}/{reads_ahead}")
        on_ranks(2, _train, its_own, reads_ahead)
        steps = read_ledger(Store(its_own.run_url)).steps
        found.append([steps[name].to_pylist() for name in ("sample_digest", "loss", "step_samples")])
        assert set(steps["transfer_s"].to_pylist()) == {0.0}  # a CPU has nothing to transfer
    assert found[0] == found[1]


class FailingStream:
    """Stream of which a read fails."""

    def take(self, virtual_worker: int, count: int) -> None:
        raise OSError("the disk is gone")


def test_an_error_of_reading_ahead_is_raised_when_the_samples_are_needed() -> None:
    batches = DeviceBatches(FailingStream(), torch.device("cpu"), reads_ahead=True)  # type: ignore[arg-type]
    batches.begin_next(MicroBatch(0, 0, 0, 2))
    with pytest.raises(OSError, match="the disk is gone"):
        batches.take(MicroBatch(0, 0, 0, 2))
