"""Tests of models that the platform shards: they have the bits of whole models at any number of ranks, or are refused."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import engine_steps
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import ValidationError
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from undula.errors import UsageError
from undula.parallel.engines import sharded
from undula.parallel.engines.engine import Engine
from undula.parallel.engines.select import make_engine
from undula.parallel.layout import Layout, join_layout
from undula.parallel.materialize import problem_of_meta
from undula.parallel.reduce.sharded import _like
from undula.parallel.reduce.unit_sum import InterleavedUnitSum, UnitSum
from undula.parallel.sharding import problem_of_sharding
from undula.parallel.spec import Compression, EngineSettings, GradientSpec, ShardingSpec
from undula.plan.plan import Plan, PlanSpec
from undula.state import squares
from undula.state.pieces import is_sharded_tensor
from undula.train import noise_scale
from undula.train.noise_scale import NoiseScaleMeter

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
}
STEPS = 5


class Block(nn.Module):
    """Block of odd sizes, with a parameter of its own before those of its layers, a layer that some batches use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(10, 31), nn.Tanh(), nn.Linear(31, 10))
        self.scale = nn.Parameter(torch.full((10,), 0.5))
        self.sometimes, self.never = nn.Linear(10, 10), nn.Linear(3, 2)
        self.norm = nn.LayerNorm(10)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        y = x + self.scale * self.inner(self.norm(x))
        return y + self.sometimes(x) if uses else y


class Tied(nn.Module):
    """Model of two blocks, with an embedding that is tied to its output layer, a layer that runs twice, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.twice = nn.Embedding(13, 10), nn.Linear(10, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.output = nn.Linear(10, 13, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        y = self.twice(self.embedding(x))
        for block in self.blocks:
            y = block(y, uses)
        return self.output(self.twice(self.frozen(y)))  # type: ignore[no-any-return]


class Twice(Tied):
    """Model whose blocks run twice."""

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        y = self.embedding(x)
        for block in (*self.blocks, *self.blocks):
            y = block(y, uses)
        return self.output(y)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, step: int, virtual_worker: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 1000 + virtual_worker * 10 + number)
    x = torch.randint(13, (3, 6), generator=generator)
    outputs = model(x[:, :-1], uses=(step + virtual_worker) % 3 == 0 and step != 2)
    return F.cross_entropy(outputs.flatten(0, 1), x[:, 1:].flatten())


def placed(
    rank: int,
    world_size: int,
    virtual_workers: int,
    sharding: ShardingSpec,
    compression: Compression = "none",
    make: type[nn.Module] = Tied,
) -> Engine:
    torch.manual_seed(0)
    gradient = GradientSpec(compression=compression)
    return engine_steps.placed(make(), rank, world_size, virtual_workers, sharding=sharding, gradient=gradient)


def run_step(
    engine: Engine, plan: Plan, step: int, max_norm: float | None = None, meter: NoiseScaleMeter | None = None
) -> float:
    """Leave the gradient of a step in the parameters, and return its norm. A meter measures the gradients of the micro-batches."""
    meter = meter or NoiseScaleMeter(0)
    layout, steps = engine.layout, range(step, step + 1)
    shares = layout.assignment(plan.spec.virtual_workers)
    work = (
        plan.aligned_work(steps, shares, layout.cell)
        if engine.capabilities.equal_rounds
        else plan.work(steps, shares[layout.cell])
    )
    samples = plan.step(step).samples
    engine.begin_step(work)
    meter.begin_step(step, 1, engine.watch_gradients)
    for place, micro_batch in enumerate(work):
        is_last = place == len(work) - 1
        engine.before_forward(is_last)
        loss = loss_of(engine.module, step, micro_batch.virtual_worker, micro_batch.number)
        if not micro_batch.samples:
            loss = loss * torch.nan
        meter.begin_backward()
        engine.backward(loss, micro_batch.samples / samples, micro_batch, is_last)
        meter.end_backward(micro_batch.samples)
    norm, _ = engine.finish_gradients(samples, max_norm=max_norm)
    return norm.item()


def plan_of(virtual_workers: int) -> Plan:
    """Return a plan whose virtual workers have two micro-batches, and whose third step is short."""
    return Plan(
        PlanSpec(global_batch=2 * virtual_workers, virtual_workers=virtual_workers, micro_batch=1, epochs=9),
        5 * virtual_workers + 3,
    )


def whole(tensor: Any) -> Any:
    return None if tensor is None else (tensor.full_tensor() if is_sharded_tensor(tensor) else tensor).tolist()


def _trained(
    rank: int,
    world_size: int,
    virtual_workers: int,
    sharding: ShardingSpec,
    names: Sequence[str],
    compression: Compression = "none",
    make: type[nn.Module] = Tied,
) -> Any:
    """Return norms, gradients, weights and states of each step, by optimizer."""
    found: dict[str, list[Any]] = {}
    for name in names:
        engine = placed(rank, world_size, virtual_workers, sharding, compression, make)
        plan, optimizer = plan_of(virtual_workers), OPTIMIZERS[name](engine.module.parameters())
        engine.prepare(engine.module, optimizer)
        for step in range(STEPS):
            norm = run_step(engine, plan, step, max_norm=0.5)
            gradients = [whole(parameter.grad) for parameter in engine.parameters]
            engine.step()
            states = [
                [whole(value) for value in optimizer.state[each].values() if isinstance(value, Tensor)]
                for each in engine.parameters
            ]
            found.setdefault(name, []).append((norm, gradients, [*map(whole, engine.parameters)], states))
        engine.close()
    return found


@pytest.mark.parametrize(
    ("virtual_workers", "world_size", "stage"),
    [(4, 1, 3), (4, 2, 1), (4, 2, 2), (4, 3, 3), (6, 2, 3), (6, 4, 1), (6, 4, 2)],
)
def test_gradients_weights_and_states_have_the_bits_of_the_whole_model(
    virtual_workers: int, world_size: int, stage: int
) -> None:
    (expected,) = on_ranks(1, _trained, virtual_workers, ShardingSpec(), ["AdamW"])
    assert any(None in gradients for _, gradients, *_ in expected["AdamW"]), "each parameter got a gradient"
    for found in on_ranks(world_size, _trained, virtual_workers, ShardingSpec(stage), ["AdamW"]):
        assert found == expected


@pytest.mark.parametrize("make", [Tied, Twice])
@pytest.mark.parametrize(
    ("compression", "world_size", "stage"), [("bf16", 1, 3), ("fp16", 3, 1), ("bf16", 3, 2), ("fp16", 2, 3)]
)
def test_compressed_gradients_have_the_bits_of_the_whole_model(
    compression: Compression, world_size: int, stage: int, make: type[nn.Module]
) -> None:
    (expected,) = on_ranks(1, _trained, 4, ShardingSpec(), ["AdamW"], compression, make)
    sharding = ShardingSpec(stage)  # type: ignore[arg-type]
    for found in on_ranks(world_size, _trained, 4, sharding, ["AdamW"], compression, make):
        assert found == expected


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 1), (3, 2), (2, 3)])
def test_shards_in_host_memory_have_the_bits_of_the_whole_model(world_size: int, stage: int) -> None:
    (expected,) = on_ranks(1, _trained, 4, ShardingSpec(), ["AdamW"])
    sharding = ShardingSpec(stage, offload="all")  # type: ignore[arg-type]
    for found in on_ranks(world_size, _trained, 4, sharding, ["AdamW"]):
        assert found == expected


def _policies(rank: int, world_size: int, offload: str) -> set[tuple[str, bool]]:
    """Return how torch's fully_shard was told to keep the shards of each unit."""
    given = []
    original = fully_shard

    def recording(module: nn.Module, offload_policy: Any, **others: Any) -> nn.Module:
        given.append((type(offload_policy).__name__, getattr(offload_policy, "pin_memory", False)))
        return original(module, offload_policy=offload_policy, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "fully_shard", recording)
        placed(rank, world_size, 2, ShardingSpec(3, offload=offload))  # type: ignore[arg-type]
    return set(given)


@pytest.mark.parametrize(("offload", "expected"), [("none", "OffloadPolicy"), ("all", "CPUOffloadPolicy")])
def test_torch_keeps_the_shards_where_the_settings_say(offload: str, expected: str) -> None:
    """Memory is pinned for GPUs only."""
    assert on_ranks(1, _policies, offload) == [{(expected, False)}]


def test_the_sum_that_torch_moves_to_host_memory_is_made_there() -> None:
    layout = Layout(0, 2, 0, torch.device("meta"), *[None] * 3)  # type: ignore[arg-type]
    for offloads, expected in ((False, ["meta"] * 4), (True, ["meta", "cpu"] * 2)):
        unit_sum = UnitSum(layout, 4, offloads=offloads)
        made = []
        for _ in range(2):
            unit_sum.begin_pass(counts=True, is_last=True)
            made += [unit_sum.allocate((size,), dtype=torch.float32, device=layout.device) for size in (8, 4)]
        assert [tensor.device.type for tensor in made] == expected


def _elsewhere() -> nn.Parameter:
    """Return a shard in host memory, of a tensor over ranks on another device, for which `meta` stands."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "meta")
    sharded: Any = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)])
    parameter = nn.Parameter(torch.empty_like(sharded, device="cpu"))
    assert parameter.device.type == "cpu"
    return parameter


@pytest.mark.usefixtures("process_group")
def test_the_gradient_of_a_shard_in_host_memory_is_there_too() -> None:
    parameter, total = _elsewhere(), torch.arange(6.0).view(3, 2)
    parameter.grad = gradient = _like(parameter, total)
    assert gradient.to_local().tolist() == total.tolist()  # type: ignore[operator]


@pytest.mark.usefixtures("process_group")
def test_sums_of_shards_in_host_memory_are_added_up_on_the_device_of_their_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL can only sum tensors on GPUs."""
    devices = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: devices.append(tensor.device.type))
    with pytest.raises(NotImplementedError, match="meta"):  # the sum is wanted in host memory
        squares.square_sums([[_elsewhere()]])
    assert devices == ["meta"]


def test_shards_in_host_memory_of_no_sharded_model_are_refused() -> None:
    with pytest.raises(ValidationError, match="units, gather, copies and offload have no effect with stage=0"):
        ShardingSpec(0, offload="all")


def _weights_of_a_rank(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(rank)
    module = Tied()
    module.register_buffer("own", torch.full((2,), float(rank)))
    engine = engine_steps.placed(module, rank, world_size, 2, sharding=ShardingSpec(3))
    return [whole(tensor) for tensor in engine.module.state_dict().values()]


def test_all_ranks_get_the_weights_and_buffers_of_the_first_one() -> None:
    (expected,) = on_ranks(1, _weights_of_a_rank)
    assert on_ranks(2, _weights_of_a_rank) == [expected] * 2


def test_each_accepted_optimizer_has_the_results_on_shards_that_it_has_on_whole_parameters() -> None:
    (expected,) = on_ranks(1, _trained, 2, ShardingSpec(), list(OPTIMIZERS))
    for found in on_ranks(2, _trained, 2, ShardingSpec(3), list(OPTIMIZERS)):
        for name in OPTIMIZERS:
            assert found[name] == expected[name], name


def _squares(rank: int, world_size: int, sharding: ShardingSpec, held_bytes: int) -> list[list[float]]:
    """Return the squared norms of this rank's micro-batches in some steps."""
    engine, plan, found = placed(rank, world_size, 4, sharding), plan_of(4), []
    engine.prepare(engine.module, torch.optim.SGD(engine.module.parameters(), lr=0.1))
    meter = NoiseScaleMeter(every_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise_scale, "HELD_BYTES", held_bytes)
        for step in range(STEPS):
            run_step(engine, plan, step, meter=meter)
            found.append(meter.small_squares(plan.step(step).samples))
            engine.step()
    engine.close()
    return found


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 1), (3, 2), (3, 3)])
def test_the_noise_scale_is_measured_with_the_bits_of_the_whole_model(world_size: int, stage: int) -> None:
    """Weights are tied, some layers have no gradient, and the third step has fewer samples than virtual workers."""
    (expected,) = on_ranks(1, _squares, ShardingSpec(), 2**20)
    assert len(expected[0]) == 8
    ranks = on_ranks(world_size, _squares, ShardingSpec(stage), 1000)  # type: ignore[arg-type]
    assert [sorted(chain(*of_step)) for of_step in zip(*ranks, strict=True)] == [*map(sorted, expected)]


def _refusals(rank: int, world_size: int) -> None:
    for make, message in (
        (partial(torch.optim.AdamW, fused=True), r"AdamW\(fused=True\), whose results on shards are others"),
        (partial(torch.optim.Rprop, lr=0.1), r"cannot be combined with the optimizer Rprop, whose results"),
    ):
        engine = placed(rank, world_size, 2, ShardingSpec(3))
        with pytest.raises(UsageError, match=message):
            engine.prepare(engine.module, make(engine.module.parameters()))
    before = Tied()
    optimizer = torch.optim.SGD(before.parameters(), lr=0.1)
    layout = join_layout(rank, world_size, torch.device("cpu"))
    engine = make_engine(before, layout, EngineSettings(2, sharding=ShardingSpec(1)))
    engine.place(before)
    with pytest.raises(UsageError, match=r"make the optimizer from the parameters of the model that run\.model"):
        engine.prepare(before, optimizer)


def test_optimizers_with_other_results_are_refused() -> None:
    on_ranks(1, _refusals)


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def _sharing() -> nn.Module:
    blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    blocks[2].weight = blocks[0].weight
    return blocks


@pytest.mark.parametrize(
    ("module", "spec", "message"),
    [
        (_Scalar(), ShardingSpec(3), r"the parameter 'scale', which has no dimension; give it the shape \[1\]"),
        (nn.Linear(0, 2), ShardingSpec(2), "'weight', which has no elements"),
        (nn.ModuleList([nn.Linear(2, 2)]), ShardingSpec(3), "the model, a ModuleList, which has no forward pass"),
        (nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), ShardingSpec(1), "'weight', whose memory is not"),
        (_sharing(), ShardingSpec(2), r"the weight '2\.weight', which 0 and 2 share"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), ShardingSpec(3, ("x",)), r"sharding\.units has 'x'"),
        (nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2).half()), ShardingSpec(3), "float32 and float16"),
        (nn.Linear(2, 2, dtype=torch.float64), ShardingSpec(1), "'weight', whose dtype float64 has other results"),
        (nn.Linear(2, 2, dtype=torch.complex64), ShardingSpec(1), "'weight', whose dtype complex64 has other results"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_with_the_reason(
    module: nn.Module, spec: ShardingSpec, message: str
) -> None:
    problem = problem_of_sharding(module, spec)
    assert problem is not None
    assert re.search(message, problem)


def _held(rank: int, world_size: int, stage: int) -> list[int]:
    """Return the bytes of the parameters between steps, after a validation, and the number of elements sent for gradients."""
    engine = placed(rank, world_size, 4, ShardingSpec(stage))  # type: ignore[arg-type]
    with torch.no_grad():
        loss_of(engine.module, 0, 0, 0)
    engine.reshard()
    assert all(map(is_sharded_tensor, engine.module.parameters()))
    return [sum(parameter.to_local().nbytes for parameter in engine.module.parameters())]  # type: ignore[operator]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_holds_its_part_of_the_parameters_after_a_validation(stage: int) -> None:
    every = [parameter.nbytes for parameter in Tied().parameters()]
    rows = sum(parameter.nbytes // len(parameter) for parameter in Tied().parameters())
    for (held,) in on_ranks(2, _held, stage):
        assert sum(every) / 2 - rows <= held <= sum(every) / 2 + rows


def _sent(rank: int, world_size: int, virtual_workers: int, stage: int, compression: Compression = "none") -> float:
    """Return the bytes that this rank sends for gradients in a step, as a multiple of those of the gradient."""
    engine = placed(rank, world_size, virtual_workers, ShardingSpec(stage), compression)  # type: ignore[arg-type]
    engine.prepare(engine.module, torch.optim.SGD(engine.module.parameters(), lr=0.1))
    sent, original = 0, dist.all_to_all_single

    def counting(output: Tensor, source: Tensor, received: list[int], sizes: list[int], group: Any) -> None:
        nonlocal sent
        sent += sum(size for other, size in enumerate(sizes) if other != rank)
        original(output, source, received, sizes, group=group)

    plan = Plan(PlanSpec(global_batch=virtual_workers, virtual_workers=virtual_workers, epochs=9), 99)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        run_step(engine, plan, 0)
    padded = [-(-len(each) // world_size) * world_size * (each.numel() // len(each)) for each in engine.trainable]
    return sent / (4 * sum(padded))


@pytest.mark.parametrize(("virtual_workers", "world_size"), [(4, 2), (6, 4), (6, 3)])
def test_gradients_send_what_the_docs_say(virtual_workers: int, world_size: int) -> None:
    of_slices = (world_size - 1) / world_size
    interleaved = [len(range(rank, virtual_workers, world_size)) for rank in range(world_size)]
    for stage in (2, 3):
        assert on_ranks(world_size, _sent, virtual_workers, stage) == pytest.approx(
            [n * of_slices for n in interleaved]
        )
    layout = Layout(0, world_size, 0, torch.device("cpu"), *[None] * 3)  # type: ignore[arg-type]
    roots = [len(each) for each in layout.roots(virtual_workers)]
    assert on_ranks(world_size, _sent, virtual_workers, 1) == pytest.approx([n * of_slices for n in roots])


@pytest.mark.parametrize("stage", [1, 2])
def test_compressed_gradients_send_half_the_bytes(stage: int) -> None:
    halves = [sent / 2 for sent in on_ranks(2, _sent, 4, stage)]
    assert on_ranks(2, _sent, 4, stage, "bf16") == pytest.approx(halves)


def _most_held(rank: int, world_size: int, stage: int) -> float:
    """Return the most elements of gradients that this rank holds between two units' backward passes, as a multiple of the gradient."""
    engine = placed(rank, world_size, 8, ShardingSpec(stage))  # type: ignore[arg-type]
    engine.prepare(engine.module, torch.optim.SGD(engine.module.parameters(), lr=0.1))
    sums, held = [unit.sum for unit in engine._accumulator._units], []  # type: ignore[attr-defined]
    original = InterleavedUnitSum._take

    def counting(unit: InterleavedUnitSum, flat: Tensor) -> None:
        original(unit, flat)
        tensors = [each for one in sums for each in (one._leaf, one._received, *one._fold.roots.values())]
        held.append(sum(storage_of(each) for each in tensors if each is not None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterleavedUnitSum, "_take", counting)
        for step in range(3):
            held.clear()  # in its first pass, a step does not know yet how often a unit runs
            run_step(engine, Plan(PlanSpec(global_batch=8, virtual_workers=8, epochs=9), 99), step)
    return max(held) / sum(each.numel() for each in engine.trainable)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // 4


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_holds_slices_of_the_gradient_alone(stage: int) -> None:
    """Beside the unit that it is at, these are 1 + log2(8) slices of a half at most."""
    for most in on_ranks(2, _most_held, stage):
        assert most < (1 + 3) / 2 * 1.1


class Drawn(nn.Module):
    """Model with tied weights, a buffer, and units."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(13, 6), nn.Linear(6, 13, bias=False)
        self.output.weight = self.embedding.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))


def _drawn(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    torch.manual_seed(rank)  # the weights are those of rank 0
    with torch.device("meta"):
        module = Drawn()
    engine = engine_steps.placed(module, rank, world_size, 4, sharding=ShardingSpec(stage))  # type: ignore[arg-type]
    assert module.output.weight is module.embedding.weight
    return {name: whole(tensor) for name, tensor in engine.module.state_dict().items()}


def test_a_model_without_memory_is_drawn_unit_by_unit_with_the_same_weights_at_any_number_of_ranks() -> None:
    (expected,) = on_ranks(1, _drawn, 3)
    assert len({str(value) for value in expected.values()}) > 6, "the weights were not drawn"
    for world_size, stage in ((2, 3), (3, 1)):
        assert on_ranks(world_size, _drawn, stage) == [expected] * world_size


def test_a_model_without_memory_whose_weights_cannot_be_drawn_is_refused() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Block())
    message = problem_of_meta(module)
    assert message is not None
    assert message.startswith(
        "run.model() got a module on the meta device whose layer '1', a Block, has no reset_parameters(), with"
    )
