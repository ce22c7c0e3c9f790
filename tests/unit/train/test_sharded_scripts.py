"""Tests of what scripts do to a sharded model: it has the numbers of a whole model, or is refused in a sentence."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from feature_scripts import ROWS, Train, adamw, square
from features import FEATURES, Feature, Group, numbers_of, train_in_groups
from numbers_job import numbers_job
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from undula.errors import UsageError
from undula.parallel.spec import ShardingSpec
from undula.train.job import Job
from undula.train.run import Run
from undula.train.shard_errors import ASSIGNED, MIXED, NO_RULE, note_shards
from undula.train.single_process import SingleProcess
from undula.train.step import Step

Act = Callable[[nn.Module, Step], object]
PLAN = {"micro_batch": 2, "epochs": 2}


class Blocks(nn.Module):
    """Blocks of which a batch can skip one or run one twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(1, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in range(3))
        self.skipped: int | None = None
        self.twice = False
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for place, block in enumerate(self.blocks):
            if place != self.skipped:
                y = y + block(y)
        if self.twice:
            y = checkpoint(self.blocks[1], checkpoint(self.blocks[1], y, use_reentrant=True), use_reentrant=True)
        return self.last(y) + sum(weight.sum() for weight in self.kept)  # type: ignore[no-any-return]


def nothing(model: nn.Module, step: Step) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Script:
    """Train function of a model, with work of its own at some places."""

    placed: Callable[[nn.Module], object] = lambda model: None
    unplaced: Callable[[nn.Module], object] = lambda model: None
    began: Act = nothing
    in_batch: Act = nothing
    """Before the loss of a batch is computed."""
    penalty: Callable[[Any], Any] = lambda model: 0.0
    """Term of the loss, which is computed before the forward pass."""
    reduced: Act = nothing
    updated: Act = nothing

    def __call__(self, run: Run, ends: Callable[[int], None]) -> None:
        module = Blocks()
        self.unplaced(module)
        model = run.model(module)
        self.placed(model)
        run.optimizer(adamw(model))
        for step in run.steps(validate=lambda batch: square(model, batch)):
            self.began(model, step)
            for batch in step.batches():
                self.in_batch(model, step)
                step.backward(self.penalty(model) + square(model, batch))
            step.reduce()
            self.reduced(model, step)
            ends(step.index)
            step.update()
            self.updated(model, step)


def generate(model: nn.Module, step: Step) -> None:
    with torch.no_grad():
        model(torch.ones(4, 1) / ROWS)


def freeze_and_skip(model: Any, step: Step) -> None:
    model.blocks[0].requires_grad_(step.index != 1)
    model.skipped = 1 if step.index > 1 else None


def skip_by_number(model: Any, step: Step) -> None:
    assert step.micro_batch is not None
    model.skipped = 2 if step.micro_batch.number == 0 else None


def generate_and_halve(model: nn.Module, step: Step) -> None:
    generate(model, step)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def generate_and_change(model: nn.Module, step: Step) -> None:
    generate(model, step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)


def mask(model: Any, step: Step) -> None:
    """Set elements of weights to zero with whole masks, which each rank has."""
    weight = model.blocks[0][0].weight
    with torch.no_grad():
        weight.mul_(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5])[:, None])
        weight[:, 2].mul_(0.5)
        model.first.weight.masked_fill_(torch.arange(6)[:, None] == 4, 0.25)


def load_whole(model: Any, step: Step) -> None:
    whole = {name: torch.full(value.shape, 0.125 * len(name)) for name, value in model.last.state_dict().items()}
    whole["weight"][0, :3] = torch.arange(3.0)
    model.last.load_state_dict(whole)
    state = model.first.state_dict()
    first = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    model.first.load_state_dict({name: value * 0.5 for name, value in first.items()})


def in_rows(change: Callable[[Any], object]) -> Act:
    """Return work of a script that changes rows of a weight in place."""

    def work(model: Any, step: Step) -> None:
        with torch.no_grad():
            change(model.blocks[0][0].weight)

    return work


def change_gathered(model: Any, step: Step) -> None:
    model.unshard()
    with torch.no_grad():
        model.first.weight.mul_(0.5)


def assign_gathered(model: Any, step: Step) -> None:
    model.unshard()
    model.first.weight.data = model.first.weight.data * 0.5


def freeze_in_turn(model: Any, step: Step) -> None:
    assert step.micro_batch is not None
    model.blocks[0][0].weight.requires_grad_(step.micro_batch.number == 0)


def freeze_one_or_the_other(model: Any, step: Step) -> None:
    """Freeze one of two weights of a unit that have the same number of elements."""
    assert step.micro_batch is not None
    model.blocks[0][0].weight.requires_grad_(step.micro_batch.number == 0)
    model.blocks[0][2].weight.requires_grad_(step.micro_batch.number != 0)


def tie(model: Any) -> None:
    model.blocks[0][0].bias.data = model.blocks[1][0].bias.data


RIGHT: dict[str, Script] = {
    "a block is frozen for a step, and another one is skipped afterwards": Script(began=freeze_and_skip),
    "samples before the update": Script(reduced=generate),
    "gradients that change after a forward pass": Script(reduced=generate_and_halve),
    "weights that change after a forward pass": Script(updated=generate_and_change),
    "blocks that depend on the number of a micro-batch": Script(in_batch=skip_by_number),
    "weights changed by whole masks": Script(updated=mask),
    "whole weights that are loaded": Script(updated=load_whole),
}
ROW_CHANGES: dict[str, Callable[[Any], object]] = {
    "a row": lambda weight: weight[0].zero_(),
    "rows": lambda weight: weight[:2].mul_(0.5),
    "the last row": lambda weight: weight[-1].copy_(torch.ones(6)),
    "an assigned row": lambda weight: weight.__setitem__(0, 1.0),
    "a row that is added to": lambda weight: weight[1].add_(1.0),
    "a row of the data": lambda weight: weight.data.__setitem__(3, 0.0),
    "a part": lambda weight: weight.chunk(2)[0].add_(1.0),
    "columns of the transposed weight": lambda weight: weight.t()[:, 0].zero_(),
    "the diagonal": lambda weight: weight.detach().diagonal().zero_(),
}
REFUSED: dict[str, tuple[Script, str]] = {
    **{
        name: (Script(updated=in_rows(change)), "the script changed rows of a sharded tensor in place (aten.")
        for name, change in ROW_CHANGES.items()
    },
    "a hook from before": (
        Script(unplaced=lambda model: model.first.weight.register_hook(lambda gradient: gradient * 2)),  # type: ignore[operator,union-attr]
        "replaces the parameter 'first.weight', whose hook would be lost",
    ),
    "a hook": (
        Script(placed=lambda model: model.first.weight.register_hook(lambda gradient: gradient * 2)),  # type: ignore[operator,union-attr]
        "has a hook of register_hook(), which torch does not call",
    ),
    "a norm by hand": (
        Script(reduced=lambda model, step: [parameter.grad.abs().sum().item() for parameter in model.parameters()]),  # type: ignore[union-attr]
        "read a number of a sharded tensor with item() or float()",
    ),
    "weights drawn after run.model()": (
        Script(placed=lambda model: nn.init.normal_(model.first.weight)),  # type: ignore[arg-type,union-attr]
        "drew random numbers of the shape of a sharded tensor",
    ),
    "weights in a list": (
        Script(unplaced=lambda model: model.kept.append(model.first.weight)),  # type: ignore[operator,union-attr]
        "the forward pass used 'first.weight' as it was before run.model()",
    ),
    "reentrant checkpoints of a unit that runs twice": (
        Script(placed=lambda model: setattr(model, "twice", True)),
        "in several parts, which torch's fully_shard adds up wrongly",
    ),
    "a gradient of the script's own": (
        Script(in_batch=lambda model, step: torch.autograd.grad(model(torch.ones(1, 1)).sum(), model.parameters())),
        "loss.backward() or torch.autograd.grad() was called in place of step.backward()",
    ),
    "weights in the loss": (
        Script(penalty=lambda model: model.blocks[0][0].weight.square().sum()),
        "the loss of a batch is computed from shards of parameters",
    ),
    "whole weights in the loss": (
        Script(penalty=lambda model: model.blocks[0][0].weight.full_tensor().square().sum()),
        "compute() of a metric of torchmetrics, or a loss with sharded weights, but the number of workers decides",
    ),
    "an assignment to a gathered weight": (
        Script(in_batch=assign_gathered),
        "changed the parameter Linear.weight while it was gathered",
    ),
    "weights that share memory": (Script(unplaced=tie), "which share memory, as after `data = other.data`"),
    "weights that are to share memory": (
        Script(placed=tie),
        "assigned the data of one sharded parameter to another one",
    ),
    "a weight that is frozen for a batch": (
        Script(in_batch=freeze_in_turn),
        "requires_grad of a parameter of a sharded model was changed between step.batches()",
    ),
    "one of two weights that is frozen for a batch": (
        Script(in_batch=freeze_one_or_the_other),
        "requires_grad of a parameter of a sharded model was changed between step.batches()",
    ),
    "a change of a gathered weight": (
        Script(in_batch=change_gathered),
        "changed the parameter Linear.weight while it was gathered",
    ),
}


def _jobs(folder: Path, stage: int) -> dict[str, Job]:
    sharding = ShardingSpec(stage)  # type: ignore[arg-type]
    rows: dict[str, Train] = {**RIGHT, **{name: script for name, (script, _) in REFUSED.items()}}
    for name, train in rows.items():
        FEATURES[name] = Feature(train, plan=PLAN)
    jobs = {name: FEATURES[name].job(folder / str(place)) for place, name in enumerate(rows)}
    return {name: replace(job, sharding=sharding) for name, job in jobs.items()}


def _outcomes(rank: int, world_size: int, jobs: dict[str, Job], names: list[str]) -> dict[str, Any]:
    """Return the state at the end of each row, or the sentence with which it was refused."""
    rows: dict[str, Train] = {**RIGHT, **{name: script for name, (script, _) in REFUSED.items()}}
    found: dict[str, Any] = {}
    for name in names:
        FEATURES[name] = Feature(rows[name], plan=PLAN)
        try:
            found |= train_in_groups(rank, world_size, {name: jobs[name]}, (Group(),))
        except UsageError as error:
            found[name] = str(error)
            dist.barrier()
    return found


@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (3, 3)])
def test_what_scripts_do_has_the_numbers_of_a_whole_model(tmp_path: Path, world_size: int, stage: int) -> None:
    jobs = _jobs(tmp_path / "whole", 0)
    (alone,) = on_ranks(1, _outcomes, jobs, list(RIGHT))
    expected = {name: numbers_of(jobs[name]) | alone[name] for name in RIGHT}
    jobs = _jobs(tmp_path / "sharded", stage)
    for found in on_ranks(world_size, _outcomes, jobs, list(RIGHT)):
        for name in RIGHT:
            assert numbers_of(jobs[name]) | found[name] == expected[name], name


@pytest.mark.parametrize("stage", [1, 3])
def test_what_would_have_other_numbers_is_refused(tmp_path: Path, stage: int) -> None:
    for found in on_ranks(2, _outcomes, _jobs(tmp_path, stage), list(REFUSED)):
        for name, (_, sentence) in REFUSED.items():
            assert isinstance(found[name], str), name
            assert sentence in found[name], name


def average_from_before(run: Run) -> None:
    """Average the weights from copies of before run.model() on."""
    module = Blocks()
    copies = [parameter.detach().clone() for parameter in module.parameters()]
    model = run.model(module)
    with torch.no_grad():
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            copy.lerp_(parameter, 0.1)


def assign_whole(run: Run) -> None:
    model = run.model(Blocks())
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def call_a_part(run: Run) -> None:
    """Call a layer outside of the units in place of the model."""
    model: Any = run.model(Blocks())
    model.first(torch.ones(2, 1))


def make_a_vector(run: Run) -> None:
    torch.nn.utils.parameters_to_vector(run.model(Blocks()).parameters())


@pytest.mark.parametrize(
    ("train", "text", "fix"),
    [
        (average_from_before, r"mixed torch\.Tensor and DTensor", MIXED),
        (assign_whole, "has no attribute '_local_tensor'", ASSIGNED),
        (call_a_part, r"mixed torch\.Tensor and DTensor", MIXED),
        (make_a_vector, "Sharding propagation failed", NO_RULE),
    ],
)
def test_torchs_error_about_shards_names_the_fix(
    train: Callable[[Run], None], text: str, fix: str, tmp_path: Path
) -> None:
    job = replace(numbers_job(tmp_path), sharding=ShardingSpec(3))
    with pytest.raises((RuntimeError, AttributeError), match=text) as caught:
        SingleProcess(train, job, lambda message: None)()
    assert caught.value.__notes__ == [fix]


def test_another_error_gets_no_note() -> None:
    error = RuntimeError("mixed feelings")
    note_shards(error)
    assert not hasattr(error, "__notes__")
