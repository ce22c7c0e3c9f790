"""Test that a step waits for the GPU once only, so that the host can prepare the next kernels meanwhile."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from numbers_job import numbers_job
from torch import nn

from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import SingleProcess


def waits(job: Job, device: torch.device) -> list[int]:
    """Train a model with BatchNorm and dropout, and return how often each step has waited for the GPU in a call of torch."""
    found: list[int] = []

    def train(run: Run) -> None:
        layers = (nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
        model = run.model(nn.Sequential(*layers))
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr, fused=True))
        for step in run.steps():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                for batch in step.batches():
                    step.backward(model(batch["x"][:, None] / 48).square().mean())
                step.update()
                torch.cuda.set_sync_debug_mode("default")
            found.append(sum("synchronizing CUDA operation" in str(each.message) for each in caught))

    SingleProcess(train, job, lambda message: None, device=device)()
    return found


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_of_four_virtual_workers_waits_for_the_gpu_once(
    tmp_path: Path, device: torch.device, deterministic: bool
) -> None:
    job = replace(numbers_job(tmp_path, epochs=3, virtual_workers=4), deterministic=deterministic)
    # The thread that takes snapshots waits for its copies, which the step does not.
    job = replace(job, checkpoint=replace(job.checkpoint, every_steps=10**6, snapshot_every_steps=0))
    try:
        assert max(waits(job, device)[2:9]) <= 1  # the tenth step computes a digest
    finally:
        torch.use_deterministic_algorithms(False)
