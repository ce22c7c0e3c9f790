"""Tests of gradient.compression with sparse gradients: they are rounded to 16-bit floats like all other gradients."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_steps import FP16, placed, step_gradients
from numbers_job import cpu_run, numbers_job
from ranks import on_ranks
from torch import Tensor, nn

from undula.parallel.spec import GradientSpec
from undula.state.events import WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train.job import Job

FINE = 1 + 2**-12
"""Number that float32 holds and float16 rounds to 1."""


class Words(nn.Module):
    """Embedding whose rows are also used as the weights of a dense layer if it is tied."""

    def __init__(self, is_tied: bool, dtype: torch.dtype):
        super().__init__()
        self.embedding = nn.Embedding(6, 2, sparse=True, dtype=dtype)
        self.is_tied = is_tied

    def forward(self, words: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(words)
        total = embedded.sum()
        return total + self.embedding.weight.sum() if self.is_tied else total


def _gradients(rank: int, world_size: int, is_tied: bool, dtype: torch.dtype, gradient: GradientSpec) -> list[float]:
    """Return the gradient of a step in which both ranks use word 1, and each uses another word."""
    module = Words(is_tied, dtype)
    engine = placed(module, rank, world_size, virtual_workers=2, gradient=gradient)
    seen = []
    engine.free_gradients = lambda: seen.append(module.embedding.weight.grad)  # type: ignore[method-assign]
    (found,) = step_gradients(engine, (1, 1), lambda place: module(torch.tensor([1, 2 + rank])) * 2 * FINE)
    assert [(each.is_sparse, each.dtype) for each in seen] == [(not is_tied, dtype)]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_tied", [False, True])
def test_sparse_gradients_are_sent_in_the_format_of_the_compression(is_tied: bool, dtype: torch.dtype) -> None:
    everywhere = torch.full((6, 1), 2.0 if is_tied else 0.0, dtype=dtype)
    uses = everywhere + torch.tensor([0, 2, 1, 1, 0, 0], dtype=dtype)[:, None]
    for gradient, factor in ((GradientSpec(), FINE), (FP16, 1)):
        for found in on_ranks(2, _gradients, is_tied, dtype, gradient):
            assert found == (uses * factor).expand(6, 2).flatten().tolist()


def _overflowing(rank: int, world_size: int, job: Job) -> None:
    """Train with gradients of 1e5, which are too large for float16."""
    run = cpu_run(job, rank, world_size)
    model = run.model(nn.Linear(1, 1, bias=False))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    for step in run.steps():
        for batch in step.batches():
            step.backward(1e5 * model(torch.ones(len(batch["x"]), 1)).mean())
        step.update()


@pytest.mark.parametrize(
    ("compression", "world_size", "warnings"), [("fp16", 2, 1), ("fp16", 1, 1), ("bf16", 2, 0), ("none", 2, 0)]
)
def test_gradients_too_large_for_the_compression_are_reported_once(
    tmp_path: Path, compression: str, world_size: int, warnings: int
) -> None:
    spec = CheckpointSpec(max_non_finite_steps=None)  # with a rate of 0, the weights stay finite
    job = replace(numbers_job(tmp_path, max_steps=3), gradient=GradientSpec(compression=compression), checkpoint=spec)
    on_ranks(world_size, _overflowing, job)
    ledger = read_ledger(Store(job.run_url))
    codes = [event.code for event in events_of(ledger.events, WarningEvent)]
    assert codes == ["other_rates"] + ["gradient_overflow"] * warnings  # the rate is 0
    norms = ledger.steps["grad_norm"].to_pylist()
    assert norms == [float("inf") if warnings else pytest.approx(1e5, rel=2e-3)] * 3
