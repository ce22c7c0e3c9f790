"""Tests of bf16 and fp16: the loss scale follows torch's rule at any number of ranks, small gradients survive, and memory is saved."""

import json
import math
from collections.abc import Container, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from feature_scripts import OVERFLOWS, overflowing, two_layers
from features import SCALE_INTERVAL
from horovod_ranks import on_horovod_ranks
from hypothesis import given
from hypothesis import strategies as st
from numbers_job import cpu_run, numbers_job, run_batches
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from undula.parallel.engines.engine import Engine
from undula.parallel.engines.sharded import ShardedEngine
from undula.parallel.layout import join_layout
from undula.parallel.precision import Autocast, cpu_problem
from undula.parallel.spec import EngineSettings, GradientSpec, ShardingSpec
from undula.plan.plan import MicroBatch
from undula.plan.precision import PrecisionSpec
from undula.state.events import SkipEvent, WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store
from undula.train import step_part
from undula.train.job import Job
from undula.train.step_part import LONG_SKIPPED_STEPS, Scale

JOBS = Path(__file__).parents[3] / "jobs"
STEPS = 20


def trained(
    job: Job,
    rank: int = 0,
    world_size: int = 1,
    is_sharded: bool = False,
    overflows: Container[int] = OVERFLOWS,
) -> Iterator[bool]:
    """Train, and yield after each step whether the weights have changed."""
    step_part.GROWTH_INTERVAL = SCALE_INTERVAL
    run = cpu_run(job, rank, world_size)
    model = run.model(two_layers(is_sharded))
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
    for step in run.steps():
        before = weights(model)
        for batch in step.batches():
            model.step = step.index  # type: ignore[assignment]
            step.backward(overflowing(model, batch, overflows))
        step.update()
        yield weights(model) != before


def weights(model: nn.Module) -> list[float]:
    """Return this rank's elements of all weights."""
    local = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in local]).tolist()  # type: ignore[no-any-return]


def fp16_job(folder: Path, **precision: Any) -> Job:
    """Return a job of STEPS steps, each of which consumes all samples and so also the one that overflows."""
    job = numbers_job(folder, global_batch=48, epochs=STEPS)
    return replace(job, precision=PrecisionSpec(compute="fp16", **precision))


def recorded(job: Job) -> list[tuple[float, bool]]:
    """Return the loss scale of each step, and whether it changed the weights, from the ledger."""
    rows = read_ledger(Store(job.run_url)).steps.to_pylist()
    return [(json.loads(row["logged"])["loss_scale"], row["applied"]) for row in rows]


def torch_scales(overflows: Container[int] = OVERFLOWS, steps: int = STEPS) -> list[tuple[float, bool]]:
    """Return the same for torch's own scaler."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", growth_interval=SCALE_INTERVAL)
    found = []
    for index in range(steps):
        scaler.scale(weight.sum() * (math.inf if index in overflows else 1.0)).backward()  # type: ignore[no-untyped-call]
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scale, index not in overflows))
    return found


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_scale_follows_the_rule_of_torch(overflows: list[bool], interval: int) -> None:
    scale, torch_scale, growth = Scale(), torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for each in overflows:
        scale = scale.after(each, interval=interval)
        torch._amp_update_scale_(torch_scale, growth, torch.tensor(float(each)), 2.0, 0.5, interval)
        assert (scale.factor, scale.finite_steps) == (torch_scale.item(), growth.item())


def test_the_scale_does_not_grow_beyond_fp32() -> None:
    assert Scale(2.0**127).after(False, interval=1) == Scale(2.0**127)


def test_the_defaults_are_those_of_torch() -> None:
    scaler = torch.amp.GradScaler("cpu")
    theirs = (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )
    assert theirs == (step_part.INITIAL_SCALE, step_part.SCALE_GROWTH, step_part.SCALE_BACKOFF, 2000)


def _changes(rank: int, world_size: int, jobs: dict[str, Job]) -> dict[str, list[bool]]:
    """Return for each job whether each step changed this rank's weights."""
    return {kind: list(trained(job, rank, world_size, is_sharded=kind == "sharded")) for kind, job in jobs.items()}


def test_scales_and_skipped_steps_are_those_of_torch_on_every_rank(tmp_path: Path) -> None:
    """Of the ranks with shards, only one sees the overflow in its own gradient, and yet all skip the step."""
    kinds: dict[str, dict[str, Any]] = {
        "data parallel": {},
        "deterministic": {"deterministic": True},
        "sharded": {},
        "adasum": {"gradient": GradientSpec(reduce="adasum")},
        "horovod": {"engine": "horovod"},
    }
    jobs = {kind: replace(fp16_job(tmp_path / kind), **settings) for kind, settings in kinds.items()}
    horovod = {"horovod": jobs.pop("horovod")}
    ranks = on_ranks(3, _changes, jobs)
    if find_spec("horovod"):
        ranks = [one | other for one, other in zip(ranks, on_horovod_ranks(3, _changes, horovod), strict=True)]
        jobs |= horovod
    expected = torch_scales()
    for kind, job in jobs.items():
        assert [rank[kind] for rank in ranks] == [[applied for _, applied in expected]] * 3, kind
        assert recorded(job) == expected, kind
        events = events_of(read_ledger(Store(job.run_url)).events, SkipEvent)
        assert [event.step for event in events] == [step + 1 for step in sorted(OVERFLOWS)], kind


@pytest.mark.usefixtures("process_group")
def test_a_fixed_scale_stays_and_a_warning_follows_many_skipped_steps(tmp_path: Path) -> None:
    job = fp16_job(tmp_path, loss_scale=1024)
    job = replace(job, plan=replace(job.plan, epochs=LONG_SKIPPED_STEPS + 3))
    for _ in trained(job, overflows=range(1, 100)):
        pass
    assert recorded(job) == [(1024.0, True), *[(1024.0, False)] * (LONG_SKIPPED_STEPS + 2)]
    (warning,) = events_of(read_ledger(Store(job.run_url)).events, WarningEvent)
    assert (warning.code, warning.step) == ("no_finite_gradients", LONG_SKIPPED_STEPS + 1)


@pytest.mark.usefixtures("process_group")
def test_the_noise_scale_knows_no_loss_scale_and_no_skipped_steps(tmp_path: Path) -> None:
    found = {}
    for name, overflows, compute in (("fp32", (), "fp32"), ("fp16", (), "fp16"), ("with skips", (2, 3), "fp16")):
        job = replace(fp16_job(tmp_path), run_url=f"{tmp_path}/{name}", run_id=f"{tmp_path}/{name}")
        job = replace(job, precision=PrecisionSpec(compute=compute), plan=replace(job.plan, epochs=6))  # type: ignore[arg-type]
        job = replace(job, gradient=replace(job.gradient, noise_every_steps=1))
        for _ in trained(job, overflows=overflows):
            pass
        rows = read_ledger(Store(job.run_url)).steps["logged"].to_pylist()
        found[name] = [json.loads(row).get("noise_scale") for row in rows]
    assert found["fp16"] == pytest.approx(found["fp32"], rel=0.02)
    assert found["with skips"][:2] == found["fp16"][:2]
    assert found["with skips"][2:4] == [None, None]
    assert None not in found["with skips"][4:]


@pytest.mark.usefixtures("process_group")
def test_a_tiny_gradient_is_lost_without_a_scale_and_exact_with_one() -> None:
    """2^-25 is half of the smallest number of fp16, and is rounded to 0."""
    gradients = {}
    for scale in (1.0, 2.0**16):
        engine = Engine(join_layout(0, 1, torch.device("cpu")))
        model = engine.place(nn.Linear(1, 1, bias=False))
        engine.compute_in(torch.float16)
        work = [MicroBatch(0, 0, 0, 1)]
        engine.begin_step(work)
        engine.before_forward(is_last=True)
        engine.backward(model(torch.ones(1, 1)).sum() * 2.0**-25, scale, work[0], is_last=True)
        norm, overflows = engine.finish_gradients(1, max_norm=None, loss_scale=scale)
        gradients[scale] = model.weight.grad.item()  # type: ignore[union-attr,operator]
        assert (norm.item(), overflows.item()) == (gradients[scale], 0)
    assert gradients == {1.0: 0.0, 2.0**16: 2.0**-25}


@pytest.mark.usefixtures("process_group")
def test_elements_are_tested_and_not_their_norm() -> None:
    """The squares of these finite gradients do not fit fp32."""
    engine = Engine(join_layout(0, 1, torch.device("cpu")))
    model = engine.place(nn.Linear(4, 1, bias=False))
    for value, expected in ((1e30, 0), (math.inf, 1), (math.nan, 1)):
        model.weight.grad = torch.tensor([[1.0, 1.0, value, 1.0]])
        norm, overflows = engine.finish_gradients(1, max_norm=None, loss_scale=1.0)
        assert not math.isfinite(norm.item())
        assert overflows.item() == expected


def _sums_per_step(rank: int, world_size: int, job: Job) -> list[int]:
    """Return how often gradients were sent in each step."""
    counts, original = [0], dist.batch_isend_irecv

    def counted(messages: Any) -> Any:
        counts[-1] += 1
        return original(messages)

    dist.batch_isend_irecv = counted
    for _ in trained(job, rank, world_size):
        counts.append(0)
    return counts[:-1]


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_accumulation_and_autocast_make_one_sum_per_bucket_and_step(tmp_path: Path, compute: str) -> None:
    """Each rank runs six micro-batches per step. The network has one bucket."""
    job = replace(numbers_job(tmp_path, micro_batch=1), precision=PrecisionSpec(compute=compute))  # type: ignore[arg-type]
    for counts in on_ranks(2, _sums_per_step, job):
        assert counts == [1] * 4


@pytest.mark.usefixtures("process_group")
def test_a_run_in_bf16_computes_in_bf16_also_in_validation_and_keeps_weights_in_fp32(tmp_path: Path) -> None:
    job = replace(numbers_job(tmp_path), precision=PrecisionSpec(compute="bf16"))
    run = cpu_run(replace(job, data=replace(job.data, validation=job.data.train)))
    model = run.model(two_layers())
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
    outputs = set[tuple[bool, torch.dtype]]()
    layer, loss = model[2], partial(overflowing, model, steps=())  # type: ignore[index]
    model.step = 0  # type: ignore[assignment]
    layer.register_forward_hook(lambda of, inputs, output: outputs.add((of.training, output.dtype)))  # type: ignore[operator]
    for step in run.steps(validate=loss):
        for batch in step.batches():
            step.backward(loss(batch))
        step.update()
    assert outputs == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class Adapted(nn.Module):
    """A frozen base in bf16 and an adapter in fp32."""

    def __init__(self, is_sharded: bool):
        super().__init__()
        torch.manual_seed(3)
        self.base = nn.Linear(1, 4, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(1, 2), nn.Linear(2, 4)
        if is_sharded:
            fully_shard(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def _adapted(rank: int, world_size: int, job: Job, is_sharded: bool) -> list[list[float]]:
    """Return the weights of the base and of the adapter, whose first layer also the adapter's copies in bf16 would not hold."""
    run = cpu_run(job, rank, world_size)
    model = run.model(Adapted(is_sharded))
    assert isinstance(model, Adapted)
    run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    for step in run.steps():
        run_batches(step, model)
        step.update()
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
    return [each.flatten().tolist() for each in whole]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_adapters_in_fp32_train_beside_a_frozen_base_in_bf16(tmp_path: Path, is_sharded: bool) -> None:
    job = replace(numbers_job(tmp_path), precision=PrecisionSpec(compute="bf16"))
    before = [each.flatten().tolist() for each in Adapted(False).parameters()]
    first, second = on_ranks(2, _adapted, job, is_sharded)
    assert first == second
    assert first[:2] == before[:2]
    for new, old in zip(first[2:], before[2:], strict=True):
        moved = torch.tensor(new) - torch.tensor(old)
        assert moved.abs().max() > 0
        assert moved.abs().max() < 2.0**-9 * torch.tensor(old).abs().max(), "bf16 could have held these changes"


def _sharded_gradient(rank: int, world_size: int, gather: Literal["fp32", "compute"]) -> tuple[set[torch.dtype], float]:
    """Return the dtypes that the layers of a sharded model compute, and the gradient of its weight."""
    layout, seen = join_layout(rank, world_size, torch.device("cpu")), set()
    engine = ShardedEngine(layout, EngineSettings(2, compute="bf16", sharding=ShardingSpec(3, ("0",), gather)))
    model = engine.place(nn.Sequential(nn.Linear(1, 1, bias=False)))
    engine.compute_in(torch.bfloat16)
    model[0].register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))  # type: ignore[operator,index]
    work = [MicroBatch(0, rank, number, 1) for number in range(2)]
    engine.begin_step(work)
    for value, micro_batch in zip(((256.0, 0.5)[rank], 1.0), work, strict=True):
        is_last = micro_batch is work[-1]
        engine.before_forward(is_last)
        output = model(torch.full((1, 1), value))
        assert output.dtype == torch.float32
        engine.backward(output.sum(), 1.0, micro_batch, is_last)
    engine.finish_gradients(4)
    gradient = model[0].weight.grad.full_tensor()  # type: ignore[operator,index,union-attr]
    return seen, gradient.item()


@pytest.mark.parametrize("gather", ["fp32", "compute"])
def test_a_sharded_model_computes_in_bf16_and_adds_up_in_fp32(gather: str) -> None:
    """bf16 has 8 significant bits. It could hold neither the sum of the micro-batches of a rank, 257, nor that of the ranks."""
    assert on_ranks(2, _sharded_gradient, gather) == [({torch.bfloat16}, 256 + 1 + 0.5 + 1)] * 2


def test_each_use_of_a_weight_has_a_gradient_of_its_own() -> None:
    """With autocast's cache, the two gradients would be added up in bf16."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False)
    twice = nn.Sequential(layer, nn.Tanh(), layer)
    rows = torch.randn(64, 16)
    Autocast(twice, torch.device("cpu"), torch.bfloat16)
    twice(rows).square().mean().backward()
    found = layer.weight.grad
    copies = [layer.weight.detach().clone().requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        output = F.linear(torch.tanh(F.linear(rows, copies[0])), copies[1])
    output.float().square().mean().backward()
    assert found is not None
    assert copies[0].grad is not None
    assert torch.equal(found, copies[0].grad + copies[1].grad)  # type: ignore[operator]


def test_outputs_of_any_structure_are_fp32_and_a_failed_pass_leaves_no_context() -> None:
    class Structured(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"y": y, "more": (y.double(), [y.argmax(1), "text"])}

    module = Structured(3, 2)
    hooks = Autocast(module, torch.device("cpu"), torch.bfloat16)
    found = module(torch.ones(4, 3))
    assert found["y"].dtype == torch.float32
    assert [found["more"][0].dtype, found["more"][1][0].dtype] == [torch.float64, torch.int64]
    with pytest.raises(RuntimeError):
        module(torch.ones(4, 5))
    assert not torch.is_autocast_enabled("cpu")
    hooks.remove()
    assert module(torch.ones(4, 3))["y"].dtype == torch.float32
    assert not module._forward_hooks


def saved_bytes(model: nn.Module, text: Tensor) -> int:
    """Return the bytes of the activations that a forward pass and its loss keep for the backward pass."""
    known = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in known:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        total = sum(each.untyped_storage().nbytes() for each in kept.values())
    loss.backward()  # type: ignore[no-untyped-call]
    return total


def test_bf16_keeps_a_third_less_for_the_backward_pass_of_the_main_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(JOBS)
    from gpt import GPT, GPTConfig

    model = GPT(GPTConfig())
    text = torch.randint(256, (8, 257))  # the micro-batch of the main job
    whole = saved_bytes(model, text)
    Autocast(model, torch.device("cpu"), torch.bfloat16)
    assert saved_bytes(model, text) <= 0.65 * whole


def test_a_cpu_that_cannot_train_in_fp16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*inputs: Tensor) -> Tensor:
        raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'")

    assert cpu_problem("fp16") is None
    state = torch.get_rng_state()
    monkeypatch.setattr(F, "conv1d", missing)
    assert cpu_problem("fp32") is None
    problem = cpu_problem("fp16")
    assert problem is not None
    assert problem.startswith("precision.compute is fp16, but torch cannot train in fp16 on this CPU (")
    assert torch.equal(torch.get_rng_state(), state)
