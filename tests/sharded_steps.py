"""Steps of a small model with tied, frozen, unused and sometimes used weights, sharded by the platform."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import engine_steps
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undula.parallel.engines.engine import Engine
from undula.parallel.spec import Compression, GradientSpec, ShardingSpec
from undula.plan.plan import Plan, PlanSpec
from undula.state.pieces import is_sharded_tensor
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


class Routed(nn.Module):
    """Model whose batches run other units: a head for each task, experts for tokens, and blocks that are skipped or change places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 10)) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(10, 13) for _ in range(3))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        y, task = self.embedding(x), int(x.sum()) % 3
        chosen = [block for number, block in enumerate(self.blocks) if number != task]
        for block in chosen[::-1] if uses else chosen:
            y = y + block(y)
        routed = torch.zeros_like(y)
        for number in (x % 4).unique().tolist():
            rows = x % 4 == number
            routed[rows] = self.experts[number](y[rows])
        y = y + routed
        with torch.no_grad():
            scores = self.heads[(task + 1) % 3](y).softmax(-1)
        return self.heads[task](y) - 0.1 * scores  # type: ignore[no-any-return]


class Apart(Routed):
    """Model whose first units get inputs without gradients, and of which a batch may use a unit without its gradient, or twice."""

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        y = nn.functional.one_hot(x % 10, 10).float()
        for block in (*self.blocks, self.blocks[0]) if uses else self.blocks[:2]:
            y = y + block(y)
        far = self.experts[int(x[0, 0]) % 4](y)
        y = y + (far.detach() if uses else far) + self.embedding(x)
        return self.heads[0](y) + self.heads[2](y) if uses else self.heads[1](y)  # type: ignore[no-any-return]


ROUTED = ("blocks.*", "experts.*", "heads.*")
"""Units of Routed."""


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
    meter.watch = engine.watch_gradients
    meter.begin_step(step, 1)
    for place, micro_batch in enumerate(work):
        is_last = place == len(work) - 1
        engine.before_forward(is_last)
        loss = loss_of(engine.module, step, micro_batch.virtual_worker, micro_batch.number)
        if not micro_batch.samples:
            loss = loss * torch.nan
        meter.begin_backward()
        engine.backward(loss, micro_batch.samples / samples, micro_batch, is_last)
        meter.end_micro_batch(micro_batch.samples, micro_batch.virtual_worker)
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


def trained(
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
