"""Scripts of the rows in features.py: models, losses, and loops over the samples `x` of `numbers_job` or over a dataset of the script.

Modules are made on the CPU, because a run may have another default device of torch.
"""

import itertools
import math
import random
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from drawn_data import Drawn, with_noise
from numbers_job import CPU, network
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from undula.optim.optimizers import OptimizerConfig, make_optimizer
from undula.train.run import Run
from undula.train.step import Step

ROWS = 48
"""Number of samples of `numbers_job`."""
OVERFLOWS = frozenset({0, 1, 5, 9, 10, 14})
"""Steps in which the gradient overflows with `overflowing`."""
Ends = Callable[[int], None]
"""Function that a script calls with the index of each step before it commits the step, so that a group can end there."""
Train = Callable[[Run, Ends], None]


def square(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a model of one number."""
    return (model(batch["x"][:, None] / ROWS) - 1).square().mean()  # type: ignore[no-any-return]


def distilled(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a model whose target is its own result for other inputs, as in self-distillation."""
    x = batch["x"][:, None] / ROWS
    with torch.no_grad():
        target = model(1 - x)
    return (model(x) - target - 1).square().mean()  # type: ignore[no-any-return]


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a model that must tell each sample from the others of its batch."""
    features = model(batch["x"][:, None] / ROWS)
    return nn.functional.cross_entropy(features @ features.T, torch.arange(len(features), device=features.device))


def clamp(model: nn.Module) -> None:
    """Keep weights small, and give them other memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.3, 0.3) * 0.9


def swap_in_and_out(model: nn.Module) -> None:
    """Put other weights into a model and its own ones back, by reference, as classes of averages do for an evaluation."""
    own = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    for parameter, data in zip(model.parameters(), own, strict=True):
        parameter.data = data


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def of_name(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that makes the optimizer that a job's YAML names."""
    return lambda model: make_optimizer(model, OptimizerConfig(name=name, weight_decay=0.1), 0.1)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Loop:
    """Train function of a model, an optimizer and a loss, which logs, gathers and has state of its own."""

    make: Callable[[], nn.Module] = network
    optimize: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    loss: Callable[[nn.Module, Any], Tensor] = square
    validate: Callable[[nn.Module, Any], Any] | None = None
    """Result of a validation; by default the loss."""
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    between: Callable[[], float] = float
    """Number that the script makes between two steps and logs, such as a random one."""
    change: Callable[[nn.Module], None] = lambda model: None
    """Change of the weights after each update."""

    def __call__(self, run: Run, ends: Ends) -> None:
        with CPU:
            module = self.make()
        model = run.model(module)
        optimizer = self.optimize(model)
        run.optimizer(optimizer, self.schedule and self.schedule(optimizer))
        losses: list[float] = []
        run.state("losses", lambda: losses[-1:], lambda value, is_unfinished: losses.extend(value))
        for step in run.steps(validate=lambda batch: (self.validate or self.loss)(model, batch)):
            # The mean of equal numbers in 32 bits is exact in any division of the step.
            before, between = float(np.float32(losses[-1] if losses else 0)), self.between()
            for batch in step.batches():
                model.step = step.index  # type: ignore[assignment]
                step.backward(self.loss(model, batch))
                step.log(samples=len(batch["x"]), before=before, between=between)
            ends(step.index)
            step.update()
            self.change(model)
            losses.append(step.loss or 0.0)
            assert run.gather(step.loss) == [step.loss] * run.world_size


class Averaged(nn.Module):
    """Layer with statistics in buffers, one of which is made in the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(1), nn.Linear(1, 1)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean(0)
        return self.layer(self.norm(x))  # type: ignore[no-any-return]


class Embedded(nn.Module):
    """Sum of embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(ROWS, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table((x[:, 0] * (ROWS - 1)).long()))  # type: ignore[no-any-return]


COUNTED = itertools.count()


class Counted(nn.Module):
    """Layers whose names have numbers that a library counts in its process, as Keras does: a model made later has others."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = [next(COUNTED) for _ in range(3)]
        layers = network(), nn.Linear(1, 4), nn.Linear(4, 1)
        self.layers = nn.ModuleDict(
            {
                f"dense_{number}" if number else "dense": layer
                for number, layer in zip(self.numbers, layers, strict=True)
            }
        )
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers.values()
        return others[1](torch.tanh(others[0](self.norm(first(x)))))  # type: ignore[no-any-return]


class Masked(nn.Module):
    """Layer whose `reset_parameters()` makes a mask that no state has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 5))
        self.register_buffer("mask", torch.empty(5, 5, dtype=torch.bool), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.mask.fill_(True).tril_()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ (self.weight * self.mask))


def without_memory() -> nn.Module:
    """Return a network on the meta device, of which a run draws the units."""
    torch.manual_seed(3)
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(1, 5), nn.Sequential(*(Masked() for _ in range(3))), nn.Linear(5, 1))


class Counting(nn.Module):
    """Counts of the data and of the steps, in several kinds of integers, and flags."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = network(), nn.BatchNorm1d(1)
        self.register_buffer("residues", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("small", torch.full((4,), 200, dtype=torch.uint8))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int32))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(ROWS, dtype=torch.bool))
        self.register_buffer("unseen", torch.ones(ROWS, dtype=torch.bool))
        self.register_buffer("toggled", torch.zeros((), dtype=torch.bool))
        self.register_buffer("mask", torch.eye(3) > 0)
        self.register_buffer("least", torch.tensor(torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            index = (x * ROWS).round().long().flatten()
            counts = torch.bincount(index % 4, minlength=4)
            self.norm(x)
            self.residues += counts
            self.small.data.add_(counts.to(torch.uint8))
            self.samples = self.samples + len(x)
            self.steps += 1
            self.seen[index] = True
            self.unseen[index] = False
            self.toggled.logical_not_()
            self.least = torch.minimum(self.least, x.min())
        return self.net(x)  # type: ignore[no-any-return]


def normed(norm: type[nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that makes a network with a layer of batch normalization."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(1, 7), norm(7), nn.Tanh(), nn.Linear(7, 1))

    return make


class Blocks(nn.Module):
    """Repeated blocks with batch normalization and dropout, which `activations` finds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout(0.2)) for _ in range(4))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(torch.cat([x, x.sin(), x.cos(), 9 * x], dim=1))  # type: ignore[no-any-return]


class Routed(Blocks):
    """Blocks of which each batch skips one, in an order of its own, experts for its samples, and a head for its task."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y, task = torch.cat([x, x.sin(), x.cos(), 9 * x], dim=1), int(48 * x.sum()) % 4
        order = self.blocks if task > 1 else self.blocks[::-1]
        for number, block in enumerate(order):
            y = y + block(y) if number != task else y
        expert = (48 * x[:, 0]).long() % 3
        for number in expert.unique().tolist():
            rows = (expert == number).nonzero().flatten()
            y = y.index_add(0, rows, self.experts[number](y[rows]))
        return self.heads[task % 2](y)  # type: ignore[no-any-return]


def with_dropout() -> nn.Module:
    """Return a small network with dropout, which compiles fast."""
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


def two_layers(is_sharded: bool = False) -> nn.Module:
    """Return a network with three outputs for `overflowing`."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(1, 7), nn.Tanh(), nn.Linear(7, 3))
    if is_sharded:
        fully_shard(module[0])
        fully_shard(module)
    return module


def overflowing(model: nn.Module, batch: Any, steps: Container[int] = OVERFLOWS) -> Tensor:
    """Return a loss with an infinite gradient in some steps.

    Only the sample 5 overflows, so that a single virtual worker does, and only one row of the last layer's gradient.
    """
    outputs = model(batch["x"][:, None] / ROWS)
    overflows = torch.is_grad_enabled() and model.step in steps
    factor = torch.where((batch["x"] == 5) & overflows, math.inf, 1.0)
    return ((outputs[:, 0] - 1) * factor).mean() + outputs[:, 1:].square().mean()  # type: ignore[no-any-return]


def drawn(size: int = 1) -> Tensor:
    """Draw numbers from every generator that a train function may use."""
    from_numpy = torch.as_tensor(np.random.rand(size, 1), dtype=torch.float32, device=CPU)
    return torch.rand(size, 1, device=CPU) + from_numpy + random.random()


def with_random_numbers(model: nn.Module, batch: Any) -> Tensor:
    x = batch["x"]
    return (model(x[:, None] / ROWS) * drawn(len(x))).square().mean()  # type: ignore[no-any-return]


def named_means(model: nn.Module, batch: Any) -> dict[str, Tensor | float]:
    x = batch["x"]
    return {"loss": square(model, batch), "x": x.mean(), "samples": float(len(x))}


def tokens_of(x: Tensor) -> Tensor:
    """Return a number of tokens of each sample, at least one."""
    return x.remainder(5) + 1


def on_tokens(run: Run, ends: Ends = lambda index: None) -> None:
    """Train with a loss that is the mean over the tokens of a step, with a scheduler, and with a count of the script's own."""
    with CPU:
        module = network()
    model = run.model(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.base_lr)
    run.optimizer(optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    seen: list[float] = []
    run.state("tokens", lambda: seen, lambda value, is_unfinished: seen.extend(value[len(seen) :]))
    for step in run.steps():
        tokens = step.total(float(sum(tokens_of(batch["x"]).sum() for batch in step.load())))
        for batch in step.batches():
            squares = (model(batch["x"][:, None] / ROWS)[:, 0] - batch["x"] / ROWS).square()
            step.backward((squares * tokens_of(batch["x"])).sum() / tokens, share=1.0)
        norm = float(step.reduce(max_norm=0.05))
        step.log(tokens=tokens, tokens_before=sum(seen))
        ends(step.index)
        step.update()
        assert step.applied
        assert step.loss is not None
        assert (step.grad_norm or math.nan) == norm
        seen.append(tokens)


def with_own_average(run: Run, ends: Ends, is_kept: bool = True) -> None:
    """Train with an average of the weights, which only the validation uses, in the state of the script if it `is_kept`."""
    with CPU:
        module = network()
    model = run.model(module)
    run.optimizer(adamw(model))

    def weights() -> list[float]:
        whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
        return [float(number) for each in whole for number in each.detach().flatten().tolist()]

    average = weights()
    if is_kept:
        run.state("average", lambda: average, lambda value, is_unfinished: average.__setitem__(slice(None), value))

    def validate(batch: Any) -> dict[str, Any]:
        return {"loss": square(model, batch), "average": math.fsum(average)}

    for step in run.steps(validate):
        for batch in step.batches():
            step.backward(square(model, batch))
        ends(step.index)
        step.update()
        average[:] = [0.7 * mean + 0.3 * weight for mean, weight in zip(average, weights(), strict=True)]


def on_drawn(run: Run, ends: Ends = lambda index: None) -> None:
    """Train on a dataset of the script whose samples draw random numbers, with a validation."""
    run.dataset(Drawn(), validation=Drawn(26), collate_fn=with_noise, num_workers=run.config["num_workers"])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        target = batch["noise"] + (batch["python"] + batch["numpy"]).float()
        return (model(batch["x"])[:, 0] - target).square().mean()  # type: ignore[no-any-return]

    Loop(lambda: nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.2), nn.Linear(3, 1)), adamw, loss)(run, ends)


class NanGradient(torch.autograd.Function):
    """Mean whose gradient is NaN in each element, as that of a cross entropy over no valid label is, even if it is multiplied by 0."""

    @staticmethod
    def forward(context: object, values: Tensor) -> Tensor:
        return values.mean() * math.nan

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        return torch.full((2, 1), math.nan, device=CPU)


def without_samples(is_sharded: bool) -> Train:
    """Return a train function in which everything is NaN in micro-batches without samples, whose rows are the first two."""

    def train(run: Run, ends: Ends) -> None:
        with CPU:
            module = network(is_sharded)
        model = run.model(module)
        run.optimizer(sgd(model))
        for step in run.steps():
            counts = list[int]()
            for batch in step.batches():
                counts.append(samples_of(step))
                errors = (model(batch["x"][:, None] / ROWS) - batch["x"][:, None] / ROWS).square()
                step.log(inside=1.0 if counts[-1] else math.nan)
                step.backward(errors.mean() if counts[-1] else NanGradient.apply(errors))  # type: ignore[no-untyped-call]
            step.log(outside=2.0 if any(counts) else math.nan)
            ends(step.index)
            step.update()

    return train


def samples_of(step: Step) -> int:
    """Return the number of samples of the micro-batch that a step is at."""
    assert step.micro_batch is not None
    return step.micro_batch.samples
