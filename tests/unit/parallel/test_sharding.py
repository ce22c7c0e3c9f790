"""Tests of models that the platform shards: they have the bits of whole models at any number of ranks, or are refused."""

import re
from functools import partial
from itertools import chain
from typing import Any

import engine_steps
import pytest
import sharded_steps
import torch
import torch.distributed as dist
from night import at_night
from ranks import on_ranks
from sharded_steps import (
    OPTIMIZERS,
    ROUTED,
    STEPS,
    Apart,
    Block,
    Routed,
    Tied,
    Twice,
    loss_of,
    placed,
    plan_of,
    run_step,
    trained,
    whole,
)
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from undula.errors import UsageError
from undula.parallel.engines.select import make_engine
from undula.parallel.layout import Layout, join_layout
from undula.parallel.materialize import problem_of_meta
from undula.parallel.reduce.unit_sum import InterleavedUnitSum
from undula.parallel.sharding import problem_of_sharding
from undula.parallel.spec import Compression, EngineSettings, ShardingSpec
from undula.plan.plan import Plan, PlanSpec
from undula.state.pieces import is_sharded_tensor
from undula.train import noise_scale
from undula.train.noise_scale import NoiseScaleMeter


@pytest.mark.parametrize(
    ("virtual_workers", "world_size", "stage"),
    [*at_night([(4, 1, 3), (4, 2, 2), (6, 2, 3), (6, 4, 2)]), (4, 2, 1), (4, 3, 3), (6, 4, 1)],
)
def test_gradients_weights_and_states_have_the_bits_of_the_whole_model(
    virtual_workers: int, world_size: int, stage: int
) -> None:
    (expected,) = on_ranks(1, trained, virtual_workers, ShardingSpec(), ["AdamW"])
    assert any(None in gradients for _, gradients, *_ in expected["AdamW"]), "each parameter got a gradient"
    for found in on_ranks(world_size, trained, virtual_workers, ShardingSpec(stage), ["AdamW"]):
        assert found == expected


@pytest.mark.parametrize("make", [Tied, Twice])
@pytest.mark.parametrize(
    ("compression", "world_size", "stage"),
    [*at_night([("bf16", 1, 3), ("fp16", 2, 3)]), ("fp16", 3, 1), ("bf16", 3, 2)],
)
def test_compressed_gradients_have_the_bits_of_the_whole_model(
    compression: Compression, world_size: int, stage: int, make: type[nn.Module]
) -> None:
    (expected,) = on_ranks(1, trained, 4, ShardingSpec(), ["AdamW"], compression, make)
    sharding = ShardingSpec(stage)  # type: ignore[arg-type]
    for found in on_ranks(world_size, trained, 4, sharding, ["AdamW"], compression, make):
        assert found == expected


@pytest.mark.parametrize("make", [Routed, Apart])
@pytest.mark.parametrize(
    ("world_size", "stage", "compression", "units"),
    [
        *at_night([(1, 3, "none", ROUTED), (2, 1, "none", ROUTED), (2, 2, "none", ROUTED), (3, 1, "bf16", ROUTED)]),
        (2, 3, "none", ROUTED),
        (3, 2, "bf16", ROUTED),
        *at_night([(3, 3, "none", ROUTED)]),
        (3, 3, "bf16", "auto"),
    ],
)
def test_a_model_whose_batches_use_other_units_has_the_bits_of_the_whole_model(
    make: type[nn.Module], world_size: int, stage: int, compression: Compression, units: Any
) -> None:
    (expected,) = on_ranks(1, trained, 4, ShardingSpec(), ["AdamW"], compression, make)
    sharding = ShardingSpec(stage, units)  # type: ignore[arg-type]
    for found in on_ranks(world_size, trained, 4, sharding, ["AdamW"], compression, make):
        assert found == expected


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
    (expected,) = on_ranks(1, trained, 2, ShardingSpec(), list(OPTIMIZERS))
    for found in on_ranks(2, trained, 2, ShardingSpec(3), list(OPTIMIZERS)):
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


@pytest.mark.parametrize(("world_size", "stage"), [*at_night([(1, 3), (2, 1)]), (3, 2), (3, 3)])
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


@pytest.mark.parametrize(("virtual_workers", "world_size"), [*at_night([(4, 2), (6, 3)]), (6, 4)])
def test_gradients_send_what_the_docs_say(virtual_workers: int, world_size: int) -> None:
    of_slices = (world_size - 1) / world_size
    interleaved = [len(range(rank, virtual_workers, world_size)) for rank in range(world_size)]
    for stage in (2, 3):
        assert on_ranks(world_size, _sent, virtual_workers, stage) == pytest.approx(
            [n * of_slices for n in interleaved]
        )
    layout = Layout(0, world_size, 0, torch.device("cpu"), *[None] * 4)  # type: ignore[arg-type]
    roots = [len(each) for each in layout.roots(virtual_workers)]
    assert on_ranks(world_size, _sent, virtual_workers, 1) == pytest.approx([n * of_slices for n in roots])


@pytest.mark.parametrize("stage", [1, 2])
def test_compressed_gradients_send_half_the_bytes(stage: int) -> None:
    halves = [sent / 2 for sent in on_ranks(2, _sent, 4, stage)]
    assert on_ranks(2, _sent, 4, stage, "bf16") == pytest.approx(halves)


class Varying(Tied):
    """Model whose blocks run once or twice."""

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        y = self.embedding(x)
        for block in (*self.blocks, *(self.blocks if uses else ())):
            y = block(y, uses)
        return self.output(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("world_size", [2, 4])
def test_units_may_run_more_often_in_one_step_than_in_another(world_size: int) -> None:
    """All virtual workers of a step must do so, because each forward pass needs all ranks."""
    (expected,) = on_ranks(1, _varying, ShardingSpec())
    for found in on_ranks(world_size, _varying, ShardingSpec(3)):
        assert found == expected


def _varying(rank: int, world_size: int, sharding: ShardingSpec) -> list[Any]:
    engine = placed(rank, world_size, 4, sharding, make=Varying)
    engine.prepare(engine.module, torch.optim.SGD(engine.module.parameters(), lr=0.1))
    plan, found = Plan(PlanSpec(global_batch=4, virtual_workers=4, epochs=9), 99), []
    forward = Varying.forward
    for step in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Varying, "forward", lambda self, x, uses, step=step: forward(self, x, step == 1))
            found.append((run_step(engine, plan, step), [whole(each.grad) for each in engine.parameters]))
        engine.step()
    return found


class Averaged(Tied):
    """Model with an average of a part of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.blocks, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)


def _averaged(rank: int, world_size: int, sharding: ShardingSpec) -> list[Any]:
    engine = placed(rank, world_size, 4, sharding, make=Averaged)
    trained = [each for each in engine.module.parameters() if each.requires_grad]
    engine.prepare(engine.module, torch.optim.AdamW(trained, lr=0.01))
    for step in range(3):
        run_step(engine, plan_of(4), step)
        engine.step()
        engine.module.average.update_parameters(engine.module.blocks)  # type: ignore[operator]
    return [whole(each) for each in engine.module.state_dict().values()]


def test_an_average_that_is_a_part_of_the_model_has_the_bits_that_it_has_in_a_whole_one() -> None:
    (expected,) = on_ranks(1, _averaged, ShardingSpec())
    for world_size, stage in ((2, 3), (3, 1)):
        for found in on_ranks(world_size, _averaged, ShardingSpec(stage)):  # type: ignore[arg-type]
            assert found == expected


class Named(Tied):
    """Model that a script runs by another method than forward()."""

    def run(self, x: Tensor, uses: bool) -> Tensor:
        return super().forward(x, uses)


def _by_name(rank: int, world_size: int) -> str:
    engine = placed(rank, world_size, 2, ShardingSpec(3), make=Named)
    register_fsdp_forward_method(engine.module, "run")
    engine.prepare(engine.module, torch.optim.SGD(engine.module.parameters(), lr=0.1))
    plan = Plan(PlanSpec(global_batch=2, virtual_workers=2, epochs=9), 99)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_steps, "loss_of", lambda model, *of: loss_of(model.run, *of))
        with pytest.raises(UsageError) as error:
            run_step(engine, plan, 0)
    return str(error.value)


def test_a_model_that_is_run_by_another_method_is_refused() -> None:
    """Torch calls no hooks then, which say which parameters have a gradient."""
    for message in on_ranks(2, _by_name):
        assert message.startswith("a unit of the sharded model was only run by a method other than forward()")


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
