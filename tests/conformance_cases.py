"""Models and optimizers as users have them, for the conformance suite. Everything is at the top of the module, as ranks import it."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytorch_optimizer
import torch
import torch.distributed as dist
import yaml
from conformance_models import (
    WIDTH,
    WORDS,
    Averaged,
    Buffers,
    Cast,
    Changing,
    ChannelsLast,
    Complex,
    Counting,
    Dropping,
    Empty,
    Frozen,
    Lazy,
    Merged,
    Normed,
    Parametrized,
    Plain,
    Recurrent,
    Repeated,
    Replaced,
    Routed,
    Scaled,
    SometimesUsed,
    SparseWords,
    Tied,
    Unrepeatable,
    Unused,
    WithExtraState,
    WithOddExtraState,
    on_numbers,
    on_words,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from undula.data.prepare.write import array_column, array_field, write_shards
from undula.data.stored.rows import Batch
from undula.storage import Store
from undula.train.run import Run

ROWS = 12


def nothing(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Do nothing before a step."""


def leave(model: nn.Module) -> None:
    """Leave the model as it is after a step."""


@dataclass(frozen=True)
class Training:
    """A train function of a model, an optimizer and a loss."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Batch], Tensor]
    before_step: Callable[[int, nn.Module, torch.optim.Optimizer], None] = nothing
    """What the script does before each step, such as freezing a layer; called with the number of steps done."""
    after_update: Callable[[nn.Module], None] = leave
    """What the script does after the update of each step, such as averaging the weights."""
    after_step: Callable[[nn.Module], None] | None = None
    """What the script does in its function `after_step`."""
    validate: Callable[[nn.Module, Batch], Tensor] | None = None
    """Loss of a validation; by default that of the training."""
    has_state: bool = False
    """Whether the script has state of its own."""

    def __call__(self, run: Run) -> None:
        model = run.model(self.make_model())
        optimizer = run.optimizer(self.make_optimizer(model))
        if self.has_state:
            run.state("nothing", lambda: 0, lambda value, is_unfinished: None)
        validate = partial(self.validate or self.loss, model)
        work = self.after_step
        for step in run.steps(validate, None if work is None else lambda done, means: work(model)):
            self.before_step(step.index, model, optimizer)
            for batch in step.batches():
                step.backward(self.loss(model, batch))
            step.update()
            self.after_update(model)


def write_job(folder: Path) -> str:
    """Write a data set of numbers and words of shape [samples, WIDTH], and a job that trains on it. Return the job's YAML file."""
    chance = np.random.default_rng(5)
    rows = 6 * ROWS
    x, words = array_field("x", pa.float32(), (WIDTH,)), array_field("words", pa.int64(), (WIDTH,))
    columns = [
        array_column(x, chance.standard_normal((rows, WIDTH)).astype(np.float32)),
        array_column(words, chance.integers(WORDS, size=(rows, WIDTH))),
    ]
    table = pa.table(columns, schema=pa.schema([x, words]))
    write_shards(Store(f"{folder}/data"), [table], table.schema, rows, num_shards=2, row_group_bytes=1024)
    job = {
        "name": "conformance",
        "data": {"train": f"{folder}/data", "validation": f"{folder}/data"},
        "plan": {"global_batch": ROWS, "virtual_workers": 2},
        "schedule": {"base_lr": 0.05},
        "validation": {"samples": 2 * ROWS},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return f"{folder}/job.yaml"


def compiled() -> nn.Module:
    """A compiled model."""
    return torch.compile(Plain(), backend="eager")  # type: ignore[return-value]


def count_step(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change the extra state."""
    model.calls += 1  # type: ignore[operator]
    model.scale = model.scale * 0.9  # type: ignore[operator]


def freeze_and_unfreeze(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The first layer is frozen in step 0 and from step 2 on."""
    model.first.requires_grad_(step == 1)  # type: ignore[union-attr]


def unfreeze_once(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A layer that was frozen at the start is unfrozen before step 2."""
    if step == 2:
        model.requires_grad_(True)


def evaluate_from_step_1_on(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The model stays in evaluation mode after a validation of the script before step 1, which drops nothing any more."""
    if step == 1:
        model.eval()


def average_weights(model: nn.Module) -> None:
    """Move the average of the weights, a buffer, towards the weights."""
    model.average.lerp_(model.first.weight.detach(), 0.1)  # type: ignore[union-attr,operator]


def assign_second_layer(model: nn.Module) -> None:
    """Give parameters other memory, as momentum encoders and clipping by `p.data = ...` do."""
    for parameter in model.second.parameters():  # type: ignore[union-attr]
        parameter.data = parameter.data.clamp(-0.3, 0.3) * 0.9


def through_a_vector(model: nn.Module) -> None:
    """Pass the parameters through one vector."""
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.9, model.parameters())


def draw(*_: object) -> float:
    """Draw a number from each generator that a script may use."""
    return random.random() + np.random.random() + float(torch.rand(()))


def scale_by_a_drawn_number(model: nn.Module) -> None:
    """Change parameters by a drawn number."""
    with torch.no_grad():
        model.second.weight.mul_(0.5 + draw() / 6)  # type: ignore[union-attr,operator]


def draw_scale_of_step(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Draw a number for each step, as training at several scales does."""
    model.scale.fill_(draw())  # type: ignore[union-attr,operator]


def move_buffer(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Move a buffer before the batches of a step, by way of its data."""
    model.average.data.add_(1)  # type: ignore[union-attr,operator]


def on_averaged_weights(model: nn.Module, batch: Batch) -> Tensor:
    """Loss with the average of the weights in place of the weights, which are put back."""
    weight, average = model.first.weight, model.average  # type: ignore[union-attr]
    own = weight.detach().clone()  # type: ignore[operator,union-attr]
    weight.data.copy_(average)  # type: ignore[union-attr]
    try:
        return on_numbers(model, batch)
    finally:
        weight.data.copy_(own)  # type: ignore[union-attr]


def overflow_in_some_steps(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One element of the gradient is infinite in the steps 1 and 4."""
    if not hasattr(model, "overflows"):
        infinite = torch.tensor([math.inf, *[1.0] * 4])
        model.first.bias.register_hook(lambda gradient: gradient * infinite if model.overflows else gradient)  # type: ignore[union-attr,operator]
    model.overflows = step in (1, 4)  # type: ignore[assignment]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer for cases about models."""
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer without state."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


MODELS: dict[str, Training] = {
    "plain": Training(Plain, adamw, on_numbers),
    "an unused layer": Training(Unused, adamw, on_numbers),
    "a branch that some steps use": Training(SometimesUsed, adamw, on_numbers),
    "experts, heads and a layer that is skipped": Training(Routed, adamw, on_numbers),
    "channels-last parameters": Training(ChannelsLast, adamw, on_numbers),
    "a frozen layer": Training(Frozen, adamw, on_numbers),
    "tied weights": Training(Tied, adamw, on_words),
    "an LSTM with dropout": Training(Recurrent, adamw, on_words),
    "BatchNorm": Training(Normed, adamw, on_numbers),
    "repeated blocks": Training(Repeated, adamw, on_numbers),
    "a sparse embedding": Training(SparseWords, sgd, on_words),
    "buffers of all kinds": Training(Buffers, adamw, on_numbers),
    "a buffer that is replaced": Training(Replaced, adamw, on_numbers),
    "tensors without elements": Training(Empty, adamw, on_numbers),
    "complex parameters": Training(Complex, adamw, on_numbers),
    "double parameters": Training(partial(Cast, torch.float64), adamw, on_numbers),
    "bf16 parameters": Training(partial(Cast, torch.bfloat16), adamw, on_numbers),
    "parametrizations": Training(Parametrized, adamw, on_numbers),
    "a lazy layer that has seen a batch": Training(partial(Lazy, True), adamw, on_numbers),
    "extra state": Training(WithExtraState, adamw, on_numbers, count_step),
    "a compiled model": Training(compiled, adamw, on_numbers),
    "a layer that is frozen and unfrozen": Training(Plain, adamw, on_numbers, freeze_and_unfreeze),
    "a model that stays in evaluation mode": Training(Dropping, adamw, on_numbers, evaluate_from_step_1_on),
    "a layer that is unfrozen once": Training(Frozen, adamw, on_numbers, unfreeze_once),
    "an average of the weights": Training(Averaged, adamw, on_numbers, after_update=average_weights),
    "an average of the weights in after_step": Training(Averaged, adamw, on_numbers, after_step=average_weights),
    "an average in after_step, and state": Training(
        Averaged, adamw, on_numbers, after_step=average_weights, has_state=True
    ),
    "a validation that swaps weights": Training(
        Averaged, adamw, on_numbers, after_update=average_weights, validate=on_averaged_weights
    ),
    "layers that merge in eval mode": Training(Merged, adamw, on_numbers),
    "parameters with other memory": Training(Plain, adamw, on_numbers, after_update=assign_second_layer),
    "parameters through a vector": Training(Plain, adamw, on_numbers, after_step=through_a_vector),
    "random numbers before the batches": Training(Scaled, adamw, on_numbers, draw_scale_of_step),
    "random numbers after the update": Training(Plain, adamw, on_numbers, after_update=scale_by_a_drawn_number),
    "random numbers in after_step": Training(Plain, adamw, on_numbers, after_step=scale_by_a_drawn_number),
    "a buffer that moves before the batches": Training(Averaged, adamw, on_numbers, move_buffer),
}


def shrink(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change parameters before the batches."""
    model.first.weight.data.mul_(0.9)  # type: ignore[union-attr,operator]


REFUSED: dict[str, tuple[Training, str]] = {
    "parameters that change before the batches": (
        Training(Plain, adamw, on_numbers, shrink),
        r"a parameter or the state of the optimizer changed in step 0 before step\.update\(\)",
    ),
    "a lazy layer": (
        Training(partial(Lazy, False), adamw, on_numbers),
        r"run\.model\(\) got a module whose parameter .layer\.weight. has no shape yet",
    ),
    "odd extra state": (
        Training(WithOddExtraState, adamw, on_numbers),
        r"model\._extra_state\.tools is a builtins\.set, which no checkpoint can hold",
    ),
    "LBFGS": (
        Training(Plain, lambda model: torch.optim.LBFGS(model.parameters()), on_numbers),
        "LBFGS needs a closure that runs the model several times in one step",
    ),
    "momentum of sparse gradients": (
        Training(SparseWords, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), on_words),
        r"optimizer\.state\.words\.weight\.momentum_buffer is a sparse_coo tensor, which no checkpoint can hold",
    ),
}
"""Training runs that are refused, with the beginning of the message."""


class Forgetful(torch.optim.SGD):
    """An optimizer with momentum that it keeps as an attribute, where no checkpoint has it."""

    momentum: Tensor | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        weight = self.param_groups[0]["params"][0]
        self.momentum = weight.grad.clone() if self.momentum is None else 0.9 * self.momentum + weight.grad
        weight.grad.copy_(self.momentum)
        super().step()


UNSOUND: dict[str, tuple[Training, str]] = {
    "a buffer that is not persistent, and that training changes": (
        Training(Changing, adamw, on_numbers),
        "buffer.*mean, which is not persistent, has other bits after 1 steps",
    ),
    "numbers that no seed determines": (
        Training(Unrepeatable, adamw, on_numbers),
        "model.first.(bias|weight) has other bits after 1 steps of a second, equal run",
    ),
    "momentum in an attribute of the optimizer": (
        Training(Plain, lambda model: Forgetful(model.parameters(), lr=0.05), on_numbers),
        "model.first.weight has other bits after 2 steps",
    ),
}
"""Trainings that do not resume exactly, and how the sentence begins."""


def count_on_the_second_rank(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change the buffer on rank 1."""
    if dist.is_initialized() and dist.get_rank() == 1:
        model.steps += 1  # type: ignore[operator]


OVERFLOWING = Training(Plain, adamw, on_numbers, overflow_in_some_steps)
"""A training that skips some steps with `precision.compute=fp16`."""

UNSOUND_ON_THE_SECOND_RANK = Training(Counting, adamw, on_numbers, count_on_the_second_rank)
"""A training of which only rank 1 does not resume exactly."""


@dataclass(frozen=True)
class Made:
    """Function that makes an optimizer of a class for all parameters."""

    of: type[torch.optim.Optimizer]
    settings: tuple[tuple[str, object], ...] = ()

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.of(model.parameters(), **{"lr": 0.01, **dict(self.settings)})  # type: ignore[arg-type]


def made(of: type[torch.optim.Optimizer], **settings: object) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Make an optimizer of a class, with settings other than its defaults."""
    return Made(of, tuple(settings.items()))


def several_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Groups with their own settings, one of which is empty."""
    weights = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "betas": (0.8, 0.9)}, {"params": []}]
    return torch.optim.AdamW(groups, lr=0.05)


def with_tensor_rate(model: nn.Module) -> torch.optim.Optimizer:
    """A learning rate that is a tensor."""
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05))


def first_layer(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of only the first layer."""
    return torch.optim.AdamW(model.first.parameters(), lr=0.05)  # type: ignore[union-attr]


def add_second_layer(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Add a group before step 2."""
    if step >= 2 and len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.02})  # type: ignore[union-attr]


def matrices(model: nn.Module) -> torch.optim.Optimizer:
    """Muon only accepts matrices."""
    return torch.optim.Muon([each for each in model.parameters() if each.dim() == 2], lr=0.05)


def late_momentum(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Momentum and its state start in step 2."""
    optimizer.param_groups[0]["momentum"] = 0.9 if step >= 2 else 0.0


def train_mode(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A schedule-free optimizer has different weights for training and for validation."""
    optimizer.train()  # type: ignore[attr-defined]


TORCH: dict[str, Training] = {
    **{
        of.__name__: Training(Plain, made(of), on_numbers)
        for of in (
            *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax),
            *(torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
            *(torch.optim.Rprop, torch.optim.SGD),
        )
    },
    "Muon": Training(Plain, matrices, on_numbers),
    "SparseAdam": Training(SparseWords, made(torch.optim.SparseAdam), on_words),
    "Adagrad of sparse gradients": Training(SparseWords, made(torch.optim.Adagrad), on_words),
    "SGD with momentum": Training(Plain, made(torch.optim.SGD, momentum=0.9), on_numbers),
    "SGD with momentum from step 2 on": Training(Plain, sgd, on_numbers, late_momentum),
    "Adam with amsgrad": Training(Plain, made(torch.optim.Adam, amsgrad=True), on_numbers),
    "Adam, fused": Training(Plain, made(torch.optim.Adam, fused=True), on_numbers),
    "Adam, one parameter at a time": Training(Plain, made(torch.optim.Adam, foreach=False), on_numbers),
    "RMSprop, centered": Training(Plain, made(torch.optim.RMSprop, centered=True, momentum=0.9), on_numbers),
    "several groups": Training(Plain, several_groups, on_numbers),
    "a learning rate that is a tensor": Training(Plain, with_tensor_rate, on_numbers),
    "a group added during training": Training(Plain, first_layer, on_numbers, add_second_layer),
}
"""Optimizers of torch."""

OTHERS: dict[str, Training] = {
    **{
        name: Training(Plain, made(pytorch_optimizer.load_optimizer(name)), on_numbers)
        for name in (
            *("lion", "adabelief", "adan", "came", "lamb", "lars", "madgrad", "prodigy", "dadaptadam", "adopt", "soap"),
            *("asgd", "tiger", "stablespam", "emonavi", "ademamix", "grams", "splus", "kron", "spam", "adafactor"),
        )
    },
    "schedule-free AdamW": Training(
        Plain, made(pytorch_optimizer.ScheduleFreeAdamW, warmup_steps=2), on_numbers, train_mode
    ),
    "schedule-free SGD": Training(Plain, made(pytorch_optimizer.ScheduleFreeSGD), on_numbers, train_mode),
    "schedule-free RAdam": Training(Plain, made(pytorch_optimizer.ScheduleFreeRAdam), on_numbers, train_mode),
    "Ranger21": Training(
        Plain, made(pytorch_optimizer.Ranger21, num_iterations=20, num_warm_up_iterations=2), on_numbers
    ),
}
"""Optimizers of pytorch-optimizer."""

ALL: dict[str, Training] = {**MODELS, **TORCH, **OTHERS}
