"""Tests of micro-batches without samples, which a rank runs so that its forward passes match those of the other ranks.

A loss over such a micro-batch may be NaN, for example the mean over no valid label. It must leave no trace, because whether there is such
a micro-batch depends on the number of ranks.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from numbers_job import cpu_run, numbers_job
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from undula.data.stored.rows import Batch
from undula.state.ledger import read_ledger
from undula.storage import Store
from undula.train.job import Job


class NanGradient(torch.autograd.Function):
    """Mean whose gradient is NaN in each element, as that of a cross entropy over no valid label is, even if it is multiplied by 0."""

    @staticmethod
    def forward(context: object, values: Tensor) -> Tensor:
        return values.mean() * math.nan

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        return torch.full((2, 1), math.nan)


def _train(rank: int, world_size: int, job: Job, is_sharded: bool) -> list[float]:
    """Train, and return the weights. In micro-batches without samples, whose rows are the first two, everything is NaN."""
    run = cpu_run(job, rank, world_size)
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    if is_sharded:
        fully_shard(module[0])
        fully_shard(module)
    model = run.model(module)
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))

    def loss(batch: Batch, has_samples: bool) -> Tensor:
        x = batch["x"]
        assert isinstance(x, Tensor)
        errors: Tensor = (model(x[:, None] / 48) - x[:, None]).square()
        return errors.mean() if has_samples else NanGradient.apply(errors)  # type: ignore[no-any-return,no-untyped-call]

    for step in run.steps():
        for batch in step.batches():
            assert step.micro_batch is not None
            has_samples = step.micro_batch.samples > 0
            step.log(inside=1.0 if has_samples else math.nan)
            step.backward(loss(batch, has_samples))
        has_samples = any(samples for _, samples in step._measured._losses)
        step.log(outside=2.0 if has_samples else math.nan)
        step.update()
    weights = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return [value for each in weights for value in each.flatten().tolist()]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_micro_batch_without_samples_leaves_no_trace(tmp_path: Path, is_sharded: bool) -> None:
    """The last step of an epoch has 3 of 5 samples, so that one or two of four ranks have none; three ranks have up to two of the five."""
    job = replace(numbers_job(tmp_path, global_batch=5, virtual_workers=5, epochs=2))
    (alone,) = on_ranks(1, _train, job, False)
    expected = read_ledger(Store(job.run_url)).steps
    for world_size in (3, 4):
        its_own = replace(job, run_url=f"{tmp_path}/{world_size}")
        for found in on_ranks(world_size, _train, its_own, is_sharded):
            assert found == pytest.approx(alone, rel=1e-4)
        steps = read_ledger(Store(its_own.run_url)).steps
        assert steps["loss"].to_pylist() == pytest.approx(expected["loss"].to_pylist(), rel=1e-4)
        assert steps["grad_norm"].to_pylist() == pytest.approx(expected["grad_norm"].to_pylist(), rel=1e-3)
        assert [json.loads(text) for text in steps["logged"].to_pylist()] == [{"inside": 1.0, "outside": 2.0}] * 20
