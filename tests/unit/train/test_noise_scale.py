"""The gradient noise scale as a run measures it: right, the same at any number of ranks, and still there after a resume."""

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
from numbers_job import cpu_run, numbers_job
from ranks import on_ranks
from torch import Tensor, nn

from undula.data.write import write_shards
from undula.parallel.capabilities import Feature, refusal
from undula.parallel.engines.engine import trainable
from undula.parallel.norms import gradient_norm
from undula.parallel.spec import GradientSpec
from undula.plan.noise import StepNorms
from undula.plan.schedule import ScheduleSpec
from undula.recovery.worker_state import WorkerState
from undula.state.ledger import read_ledger
from undula.storage import Store
from undula.train.context import TrainContext
from undula.train.job import Job
from undula.train.noise_scale import NoiseScaleMeter
from undula.train.run import Run


def one_step(
    meter: NoiseScaleMeter, module: nn.Module, shares: list[Tensor], index: int = 0, scale: float = 1.0
) -> StepNorms:
    """A step over micro-batches of some samples each, with gradients that add up, as the loop takes it."""
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
    """Mean of |x - target|^2 / 2: the gradient of a sample is x - target, whose covariance is the targets'."""

    def __init__(self, size: int):
        super().__init__()
        self.x = nn.Parameter(torch.ones(size))

    def forward(self, targets: Tensor) -> Tensor:
        return (self.x - targets).square().sum(dim=1).mean() / 2


def test_a_quadratic_with_gaussian_targets_has_the_noise_scale_of_its_covariance() -> None:
    """At x = 1, with targets around 0 of deviation 3 in each of 60 coordinates: tr(Sigma) / |G|^2 = 60 * 3^2 / 60 = 9 samples."""
    torch.manual_seed(0)
    module = Quadratic(60)
    meter = NoiseScaleMeter(every_steps=1)
    found = []
    for index in range(600):
        norms = one_step(meter, module, [torch.randn(4, 60) * 3 for _ in range(8)], index)
        found.append(meter.keep(norms, clock=0.0))
    assert found[-1] == pytest.approx(9.0, rel=0.1)
    assert found[99] == pytest.approx(9.0, rel=0.2)


def test_norms_are_those_of_the_micro_batches_and_of_their_mean() -> None:
    """Weights that are used twice, a layer that a micro-batch does not use, uneven shares, gradients as a sum over virtual workers."""
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


def test_steps_between_measurements_cost_nothing_and_change_nothing() -> None:
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
    """Over samples in no order: where the stored order says what they are, micro-batches differ by more than chance."""
    job = numbers_job(folder, epochs=3, **plan)
    table = pa.table({"x": np.random.default_rng(0).normal(0.3, 1.0, 48).astype(np.float32)})
    write_shards(Store(str(folder / "data")), [table], table.schema, 48, num_shards=2, row_group_bytes=64)
    schedule = ScheduleSpec(base_lr=0.001, base_batch=3, batch_rule=rule)
    return replace(job, schedule=schedule, deterministic=deterministic, gradient=GradientSpec(noise_every_steps=2))


def steps_of(job: Job, rank: int = 0, world_size: int = 1, worker: WorkerState | None = None) -> Iterator[Run]:
    """Trains; gives the run after each step."""
    run = cpu_run(job, rank, world_size, worker)
    model = run.model(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr, momentum=0.9))
    for step in run.steps():
        for batch in step.batches():
            x = batch["x"][:, None]
            step.backward((model(x) - x - 1).square().mean())
        step.update()
        yield run


def context_of(run: Run) -> TrainContext:
    assert run._loop is not None
    return run._loop._context


def told(job: Job) -> list[tuple[float, float | None]]:
    """(learning rate, noise scale) of each step, from the ledger."""
    rows = read_ledger(Store(job.run_url)).steps.to_pylist()
    return [(row["lr"], json.loads(row["logged"]).get("noise_scale")) for row in rows]


def _train(rank: int, world_size: int, job: Job) -> list[float]:
    for run in steps_of(job, rank, world_size):
        weights = torch.cat([each.detach().flatten() for each in run._model.parameters()]).tolist()  # type: ignore[union-attr]
    return [*weights, *context_of(run).noise.measured.values()]


@pytest.mark.parametrize(("rule", "deterministic"), [("noise_scale", True), ("adascale", False), ("surge", False)])
def test_a_run_that_follows_the_noise_is_the_same_on_any_ranks(tmp_path: Path, rule: str, deterministic: bool) -> None:
    job = measuring(tmp_path, rule, deterministic)
    (alone,) = on_ranks(1, _train, job)
    series = told(job)
    assert len({lr for lr, _ in series}) == 12  # it follows
    assert sum(noise is not None for _, noise in series) > 6
    for world_size in (2, 3):
        its_own = replace(job, run_url=f"{tmp_path}/{world_size}")
        for found in on_ranks(world_size, _train, its_own):
            assert found == (alone if deterministic else pytest.approx(alone, rel=1e-4))
        if deterministic:
            assert told(its_own) == series


def test_a_run_that_follows_the_noise_is_the_same_with_horovod(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed: make horovod")
    job = measuring(tmp_path, "noise_scale")
    (alone,) = on_ranks(1, _train, job)
    with_horovod = replace(job, engine="horovod", run_url=f"{tmp_path}/horovod")
    for found in on_horovod_ranks(2, _train, with_horovod):
        assert found == pytest.approx(alone, rel=1e-4)
    assert [lr for lr, _ in told(with_horovod)] == pytest.approx([lr for lr, _ in told(job)], rel=1e-4)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("through_memory", [True, False])
def test_what_was_measured_outlives_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through_memory: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    job = replace(measuring(tmp_path, "adascale", deterministic=True), run_id=str(tmp_path))
    whole = replace(job, run_url=f"{tmp_path}/whole", run_id=f"{tmp_path}/whole")
    for _ in steps_of(whole):
        pass
    worker = WorkerState()
    steps = steps_of(job, worker=worker)
    for _ in range(6 if through_memory else 7):  # a checkpoint is taken every two steps, and the last of them is of six
        run = next(steps)
    if through_memory:
        run.hand_over()
        assert worker.held is not None
    else:
        context_of(run).snapshots.delete()  # type: ignore[union-attr]
    steps.close()
    for _ in steps_of(job, worker=worker):
        pass
    assert told(job) == told(whole)


@pytest.mark.usefixtures("process_group")
def test_a_run_that_measures_nothing_has_nothing_more_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = numbers_job(tmp_path)
    for run in steps_of(job):
        held = context_of(run).live.held()
        assert not [name for name in (*held.pieces, *held.values) if not name.startswith(("model.", "optimizer."))]
    assert {noise for _, noise in told(job)} == {None}


def test_a_sharded_model_is_refused() -> None:
    message = refusal({Feature.SHARDED, Feature.NOISE_SCALE})
    assert message == f"{Feature.SHARDED} cannot be combined with {Feature.NOISE_SCALE}; remove one of them"
