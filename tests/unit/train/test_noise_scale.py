"""Tests of the gradient noise scale that a run measures: it is correct, independent of the ranks, and survives a resume."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numbers_job import cpu_run, numbers_job
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from undula.data.prepare.write import write_shards
from undula.errors import UsageError
from undula.parallel.reduce.accumulator import GradientHooks, gradient_norm, trainable
from undula.parallel.spec import GradientSpec
from undula.plan.noise import StepNorms
from undula.plan.schedule import ScheduleSpec
from undula.recovery.baseline import WORK
from undula.state.ledger import read_ledger
from undula.storage import Store
from undula.train import noise_scale
from undula.train.job import Job
from undula.train.loop import TrainingLoop
from undula.train.noise_scale import NoiseScaleMeter
from undula.train.run import Run


def one_step(
    meter: NoiseScaleMeter,
    module: nn.Module,
    shares: list[Tensor],
    index: int = 0,
    scale: float = 1.0,
    hooks: GradientHooks | None = None,
) -> StepNorms:
    """Take a step over micro-batches of the given sizes, with accumulated gradients, as the training loop does.

    Several steps of a module have the same hooks.
    """
    samples = sum(map(len, shares))
    module.zero_grad()
    meter.watch = partial((hooks or GradientHooks()).attach, trainable(module))
    meter.begin_step(index, 1)
    for share in shares:
        meter.begin_backward()
        (module(share) * scale * len(share) / samples).backward()
        meter.end_micro_batch(len(share), 0)
    small = meter.small_squares(samples)
    return StepNorms(sum(small), (float(gradient_norm(module.parameters())) / scale) ** 2, len(small), samples)


class Quadratic(nn.Module):
    """Model with the loss mean |x - target|^2 / 2. The gradient of a sample is x - target and has the covariance of the targets."""

    def __init__(self, size: int):
        super().__init__()
        self.x = nn.Parameter(torch.ones(size))

    def forward(self, targets: Tensor) -> Tensor:
        return (self.x - targets).square().sum(dim=1).mean() / 2


def test_a_quadratic_with_gaussian_targets_has_the_noise_scale_of_its_covariance() -> None:
    """At x = 1, with targets of deviation 3 around 0 in 60 coordinates, tr(Sigma) / |G|^2 = 60 * 3^2 / 60 = 9 samples."""
    torch.manual_seed(0)
    module = Quadratic(60)
    meter, hooks = NoiseScaleMeter(every_steps=1), GradientHooks()
    found = []
    for index in range(600):
        norms = one_step(meter, module, [torch.randn(4, 60) * 3 for _ in range(8)], index, hooks=hooks)
        found.append(meter.keep(norms, clock=0.0))
    assert found[-1] == pytest.approx(9.0, rel=0.1)
    assert found[99] == pytest.approx(9.0, rel=0.2)


def test_norms_are_those_of_the_micro_batches_and_their_mean() -> None:
    """The model has tied weights and a layer that one micro-batch does not use. Shares are uneven, and gradients are summed."""
    torch.manual_seed(0)
    shared = nn.Linear(3, 3)
    module = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(3, 1))
    network = nn.ModuleDict({"body": module, "unused": nn.Linear(2, 2)})
    loss = _Loss(network)
    shares = [torch.randn(size, 3) for size in (4, 3, 1)]
    norms = one_step(NoiseScaleMeter(every_steps=1, scale=3.0), loss, shares, scale=3.0)
    used = list(module.parameters())
    squares = []
    for part in [*shares, torch.cat(shares)]:
        gradients = torch.autograd.grad(loss(part), used)
        squares.append(float(torch.cat([each.flatten() for each in gradients]).square().sum()))
    assert norms.small_squared == pytest.approx(
        sum(len(part) * square for part, square in zip(shares, squares, strict=False)) / 8
    )
    assert norms.whole_squared == pytest.approx(squares[-1])
    assert (norms.micro_batches, norms.samples) == (3, 8)


class _Loss(nn.Module):
    def __init__(self, network: nn.ModuleDict):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network["body"](x).square().mean()  # type: ignore[no-any-return]


def test_steps_between_measurements_have_no_cost_and_no_effect() -> None:
    module = Quadratic(3)
    meter, hooks = NoiseScaleMeter(every_steps=3), GradientHooks()
    kept = []
    for index in range(6):
        norms = one_step(meter, module, [torch.randn(2, 3), torch.randn(2, 3)], index, hooks=hooks)
        before = meter.measured.noise
        meter.keep(norms, clock=0.0)
        kept.append((norms.micro_batches, meter.measured.noise != before))
    assert kept == [(0, False), (0, False), (2, True)] * 2
    assert NoiseScaleMeter(every_steps=0).state() == {}


def measuring(folder: Path, rule: Any) -> Job:
    """Return a job with random samples. If samples were stored by kind, micro-batches would differ by more than chance."""
    job = numbers_job(folder, epochs=3)
    table = pa.table({"x": np.random.default_rng(0).normal(0.3, 1.0, 48).astype(np.float32)})
    write_shards(Store(str(folder / "data")), [table], table.schema, 48, num_shards=2, row_group_bytes=64)
    schedule = ScheduleSpec(base_lr=0.001, base_batch=3, batch_rule=rule)
    return replace(job, schedule=schedule, gradient=GradientSpec(noise_every_steps=2))


def steps_of(job: Job) -> Iterator[Run]:
    """Train, and yield the run after each step."""
    run = cpu_run(job)
    model = run.model(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr, momentum=0.9))
    for step in run.steps():
        for batch in step.batches():
            x = batch["x"][:, None]
            step.backward((model(x) - x - 1).square().mean())
        step.update()
        yield run


def loop_of(run: Run) -> TrainingLoop:
    assert run._loop is not None
    return run._loop


def recorded_rates(job: Job) -> list[tuple[float, float | None]]:
    """Return (learning rate, noise scale) of each step, from the ledger."""
    rows = read_ledger(Store(job.run_url)).steps.to_pylist()
    return [(row["lr"], json.loads(row["logged"]).get("noise_scale")) for row in rows]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("rule", ["noise_scale", "adascale", "surge"])
def test_the_learning_rate_follows_the_noise_scale_by_a_measured_rule(tmp_path: Path, rule: str) -> None:
    job = measuring(tmp_path, rule)
    for _ in steps_of(job):
        pass
    series = recorded_rates(job)
    assert len({lr for lr, _ in series}) == 12
    assert sum(noise is not None for _, noise in series) > 6


@pytest.mark.usefixtures("process_group")
def test_a_run_without_measurements_saves_no_additional_state(tmp_path: Path) -> None:
    job = numbers_job(tmp_path)
    for run in steps_of(job):
        held = loop_of(run).saver._live.held()
        names = [name for name in (*held.pieces, *held.values) if not name.startswith(("model.", "optimizer."))]
        assert set(names) <= {"given", "arithmetic", WORK}
    assert {noise for _, noise in recorded_rates(job)} == {None}


def test_a_gradient_in_parts_is_refused() -> None:
    layer = nn.Linear(2, 1)
    meter = NoiseScaleMeter(every_steps=1, watch=partial(GradientHooks().attach, trainable(layer)))
    meter.begin_step(0, 1)
    meter.begin_backward()
    x = torch.ones(1, 2, requires_grad=True)
    twice = checkpoint(layer, x, use_reentrant=True) + checkpoint(layer, 2 * x, use_reentrant=True)
    with pytest.raises(UsageError, match="computes the gradient of a layer in several parts"):
        twice.sum().backward()


def test_norms_do_not_depend_on_which_gradients_are_collected_together(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for held_bytes in (1, 2**20):
        monkeypatch.setattr(noise_scale, "HELD_BYTES", held_bytes)
        torch.manual_seed(0)
        network = _Loss(nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(9, 9) for _ in range(5)))}))
        found.append(one_step(NoiseScaleMeter(every_steps=1), network, [torch.randn(4, 9) for _ in range(8)]))
    assert found[0] == found[1]
