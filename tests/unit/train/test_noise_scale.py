"""Tests of the gradient noise scale that a run measures: it is correct, independent of the ranks, and survives a resume."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from horovod_ranks import on_horovod_ranks
from numbers_job import cpu_run, leave_after_next, numbers_job
from ranks import on_ranks
from torch import Tensor, nn

from undula.data.prepare.write import write_shards
from undula.parallel.capabilities import Feature, refusal
from undula.parallel.norms import gradient_norm
from undula.parallel.parameters import trainable
from undula.parallel.spec import GradientSpec
from undula.plan.noise import StepNorms
from undula.plan.schedule import ScheduleSpec
from undula.recovery.worker_state import WorkerState
from undula.state.ledger import read_ledger
from undula.storage import Store
from undula.train.job import Job
from undula.train.loop import TrainingLoop
from undula.train.noise_scale import NoiseScaleMeter
from undula.train.run import Run


def one_step(
    meter: NoiseScaleMeter, module: nn.Module, shares: list[Tensor], index: int = 0, scale: float = 1.0
) -> StepNorms:
    """Take a step over micro-batches of the given sizes, with accumulated gradients, as the training loop does."""
    samples = sum(map(len, shares))
    module.zero_grad()
    meter.begin_step(index, 1, trainable(module))
    for share in shares:
        meter.begin_backward()
        (module(share) * scale * len(share) / samples).backward()
        meter.end_backward(len(share))
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
    meter = NoiseScaleMeter(every_steps=1)
    found = []
    for index in range(600):
        norms = one_step(meter, module, [torch.randn(4, 60) * 3 for _ in range(8)], index)
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
    meter = NoiseScaleMeter(every_steps=3)
    kept = []
    for index in range(6):
        norms = one_step(meter, module, [torch.randn(2, 3), torch.randn(2, 3)], index)
        before = meter.measured.noise
        meter.keep(norms, clock=0.0)
        kept.append((norms.micro_batches, meter.measured.noise != before))
    assert kept == [(0, False), (0, False), (2, True)] * 2
    assert NoiseScaleMeter(every_steps=0).state() == {}


def measuring(folder: Path, rule: Any, deterministic: bool = False, **plan: Any) -> Job:
    """Return a job with random samples. If samples were stored by kind, micro-batches would differ by more than chance."""
    job = numbers_job(folder, epochs=3, **plan)
    table = pa.table({"x": np.random.default_rng(0).normal(0.3, 1.0, 48).astype(np.float32)})
    write_shards(Store(str(folder / "data")), [table], table.schema, 48, num_shards=2, row_group_bytes=64)
    schedule = ScheduleSpec(base_lr=0.001, base_batch=3, batch_rule=rule)
    return replace(job, schedule=schedule, deterministic=deterministic, gradient=GradientSpec(noise_every_steps=2))


def steps_of(job: Job, rank: int = 0, world_size: int = 1, worker: WorkerState | None = None) -> Iterator[Run]:
    """Train, and yield the run after each step."""
    run = cpu_run(job, rank, world_size, worker)
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


def _train(rank: int, world_size: int, job: Job) -> list[float]:
    for run in steps_of(job, rank, world_size):
        weights = torch.cat([each.detach().flatten() for each in loop_of(run).model.module.parameters()]).tolist()  # type: ignore[union-attr]
    return [*weights, *loop_of(run).model._noise.measured.values()]


@pytest.mark.parametrize(("rule", "deterministic"), [("noise_scale", True), ("adascale", False), ("surge", False)])
def test_a_run_with_a_measured_rule_is_the_same_at_any_world_size(
    tmp_path: Path, rule: str, deterministic: bool
) -> None:
    job = measuring(tmp_path, rule, deterministic)
    (alone,) = on_ranks(1, _train, job)
    series = recorded_rates(job)
    assert len({lr for lr, _ in series}) == 12  # the rate follows the noise scale
    assert sum(noise is not None for _, noise in series) > 6
    for world_size in (2, 3):
        its_own = replace(job, run_url=f"{tmp_path}/{world_size}")
        for found in on_ranks(world_size, _train, its_own):
            assert found == (alone if deterministic else pytest.approx(alone, rel=1e-4))
        if deterministic:
            assert recorded_rates(its_own) == series


def test_a_run_with_a_measured_rule_is_the_same_with_horovod(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed: make horovod")
    job = measuring(tmp_path, "noise_scale")
    (alone,) = on_ranks(1, _train, job)
    with_horovod = replace(job, engine="horovod", run_url=f"{tmp_path}/horovod")
    for found in on_horovod_ranks(2, _train, with_horovod):
        assert found == pytest.approx(alone, rel=1e-4)
    assert [lr for lr, _ in recorded_rates(with_horovod)] == pytest.approx(
        [lr for lr, _ in recorded_rates(job)], rel=1e-4
    )


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("through_memory", [True, False])
def test_measurements_survive_their_worker_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through_memory: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    job = replace(measuring(tmp_path, "adascale", deterministic=True), run_id=str(tmp_path))
    whole = replace(job, run_url=f"{tmp_path}/whole", run_id=f"{tmp_path}/whole")
    for _ in steps_of(whole):
        pass
    worker = WorkerState()
    steps = steps_of(job, worker=worker)
    for _ in range(5 if through_memory else 7):  # a checkpoint is taken every two steps; the last one has step 6
        run = next(steps)
    if through_memory:
        leave_after_next(steps, worker)
        run.hand_over()
        assert worker.held is not None
    else:
        loop_of(run).saver.snapshots.delete()  # type: ignore[union-attr]
    steps.close()
    for _ in steps_of(job, worker=worker):
        pass
    assert recorded_rates(job) == recorded_rates(whole)


@pytest.mark.usefixtures("process_group")
def test_a_run_without_measurements_saves_no_additional_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = numbers_job(tmp_path)
    for run in steps_of(job):
        held = loop_of(run).saver._live.held()
        assert not [name for name in (*held.pieces, *held.values) if not name.startswith(("model.", "optimizer."))]
    assert {noise for _, noise in recorded_rates(job)} == {None}


def test_a_sharded_model_is_refused() -> None:
    message = refusal({Feature.SHARDED, Feature.NOISE_SCALE})
    assert message == f"{Feature.NOISE_SCALE} cannot be combined with {Feature.SHARDED}; remove one of them"
