"""Tests of runs that resume with another script or other settings: one table of what a change of each does."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from night import at_night
from numbers_job import CPU, cpu_run, numbers_job
from ranks import on_ranks
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, StepLR

from undula.data.spec import ValidationSpec
from undula.errors import UndulaError, UsageError
from undula.parallel.spec import ActivationsSpec, GradientSpec, ShardingSpec
from undula.plan.precision import PrecisionSpec
from undula.plan.schedule import ScheduleSpec
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state.events import StartEvent, WarningEvent
from undula.state.goals import StopSpec
from undula.state.ledger import events_of, read_ledger
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train.given import Given
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import local_world

Outcome = Literal["refused", "taken", "kept", "nothing"]
Origin = Literal["the memory of a worker", "the checkpoint", "the memory of a node"]
SAVED_AT = 2
"""Number of steps after which the first submission ends."""


class Net(nn.Module):
    """Network with a buffer."""

    def __init__(self, width: int = 7, bias: bool = True):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = nn.Linear(1, width), nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.first.weight.dtype)
        return self.last(torch.tanh(self.norm(self.first(x)))).float()  # type: ignore[no-any-return]


def having(**changed: Any) -> Callable[[], nn.Module]:
    """Return a function that makes the network and gives it attributes or buffers."""

    def make() -> nn.Module:
        net = Net()
        for name, value in changed.items():
            setattr(net, name, value(net) if callable(value) else value)
        return net

    return make


def with_buffer() -> nn.Module:
    net = Net()
    net.register_buffer("extra", torch.zeros(3))
    return net


def other_buffer() -> nn.Module:
    net = Net()
    net.norm.running_mean = net.norm.running_mean.double()  # type: ignore[union-attr]
    return net


def frozen() -> nn.Module:
    net = Net()
    net.first.requires_grad_(False)
    return net


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.05, **settings})


def apart(model: nn.Module, *groups: list[Any], last: float = 0.01) -> torch.optim.Optimizer:
    """Return an optimizer with a group for each list of layers, the last of which has a weight decay of its own."""
    given: list[dict[str, Any]] = [{"params": [p for layer in layers for p in layer.parameters()]} for layers in groups]
    given[-1]["weight_decay"] = last
    return torch.optim.AdamW(given, lr=0.05)


Make = Callable[[Any], Any]


def a(make: Any, **settings: Any) -> Make:
    """Return a function that makes an optimizer of all parameters, or a scheduler."""
    return lambda of: make(of.parameters() if isinstance(of, nn.Module) else of, **settings)


@dataclass(frozen=True)
class Script:
    """Train function, and the fields of its job."""

    model: Callable[[], nn.Module] = Net
    optimizer: Make = adamw
    scheduler: Make | None = None
    state: tuple[str, ...] = ()
    """Names of values that the script has registered."""
    job: Mapping[str, Any] = field(default_factory=dict)
    between: Callable[[int, torch.optim.Optimizer], object] = lambda done, optimizer: None
    """Work of the script before the batches of a step."""

    def __call__(self, run: Run, ends: Callable[[int], None]) -> None:
        module = self.model()
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        model = run.model(module)
        optimizer = self.optimizer(model)
        scheduler: LRScheduler | None = self.scheduler(optimizer) if self.scheduler else None
        run.optimizer(optimizer, scheduler)
        for name in self.state:
            run.state(name, lambda: 1, lambda value, is_unfinished: None)
        for step in run.steps(validate=lambda batch: (model(batch["x"][:, None] / 48) - 1).square().mean()):
            self.between(step.index, optimizer)
            for batch in step.batches():
                step.backward((model(batch["x"][:, None] / 48) - 1).square().mean())
            ends(step.index)
            step.update()


def set_groups(**settings: Any) -> Callable[[int, torch.optim.Optimizer], None]:
    """Return work that sets settings of all groups from the first step of the second submission on."""

    def work(done: int, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups if done == SAVED_AT else ():
            group.update(settings)

    return work


def decays_slowly(done: int, optimizer: torch.optim.Optimizer) -> None:
    """Change a constant of the optimizer in each step, as schedules of weight decay do."""
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1 * (done + 1)


@dataclass(frozen=True)
class Row:
    """What a change does."""

    outcome: Outcome
    says: tuple[str, ...] = ()
    """Parts of the error or of the event."""
    now: Script = field(default_factory=Script)
    before: Script = field(default_factory=Script)
    like: Script | None = None
    """Script that does the same in a run that is not interrupted."""


SGD = a(torch.optim.SGD, lr=0.05, momentum=0.9)
CYCLE = a(OneCycleLR, max_lr=0.2, total_steps=9)
BY_SCHEDULER = Script(scheduler=a(StepLR, step_size=1, gamma=0.5))
GROUPED = Script(optimizer=lambda model: apart(model, [model.first, model.norm], [model.last]))


NORMED = having(norm=lambda net: nn.LayerNorm(7))


def of_job(**fields: Any) -> Script:
    return Script(job=fields)


ROWS: dict[str, Row] = {
    # The model
    "nothing": Row("nothing"),
    "another width": Row("refused", ("first.weight", "(9, 1)", "(7, 1)"), Script(lambda: Net(9))),
    "a parameter less": Row("refused", ("last.bias",), Script(lambda: Net(bias=False))),
    "a buffer more": Row("refused", ("extra",), Script(with_buffer)),
    "another name": Row("refused", ("last.weight",), Script(having(final=lambda net: net._modules.pop("last")))),
    "another dtype": Row("refused", ("first.weight", "float32", "bfloat16"), Script(lambda: Net().bfloat16())),
    "another dtype of a buffer": Row("refused", ("norm.running_mean", "float32", "float64"), Script(other_buffer)),
    "frozen parameters": Row("taken", ("first.weight", "frozen"), Script(frozen)),
    # The optimizer
    "another optimizer": Row("refused", ("AdamW", "SGD"), Script(optimizer=SGD)),
    "Adam for AdamW": Row("refused", ("AdamW", "Adam"), Script(optimizer=a(torch.optim.Adam, lr=0.05))),
    "betas": Row(
        "taken",
        ("betas of parameter group 0", "(0.9, 0.999)", "(0.5, 0.9)"),
        Script(optimizer=a(torch.optim.AdamW, lr=0.05, betas=(0.5, 0.9))),
        like=Script(between=set_groups(betas=(0.5, 0.9))),
    ),
    "weight decay": Row(
        "taken",
        ("weight_decay of parameter group 0", "0.01", "0.3"),
        Script(optimizer=a(torch.optim.AdamW, lr=0.05, weight_decay=0.3)),
        like=Script(between=set_groups(weight_decay=0.3)),
    ),
    "eps": Row("taken", ("eps of", "1e-08", "0.001"), Script(optimizer=a(torch.optim.AdamW, lr=0.05, eps=1e-3))),
    "maximize": Row("taken", ("maximize",), Script(optimizer=a(torch.optim.AdamW, lr=0.05, maximize=True))),
    "foreach": Row("taken", ("foreach",), Script(optimizer=a(torch.optim.AdamW, lr=0.05, foreach=True))),
    "momentum": Row(
        "taken",
        ("momentum of", "0.9", "0.5"),
        Script(optimizer=a(torch.optim.SGD, lr=0.05, momentum=0.5)),
        Script(optimizer=SGD),
        Script(optimizer=SGD, between=set_groups(momentum=0.5)),
    ),
    "nesterov": Row(
        "taken",
        ("nesterov",),
        Script(optimizer=a(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)),
        Script(optimizer=SGD),
        Script(optimizer=SGD, between=set_groups(nesterov=True)),
    ),
    "amsgrad": Row(
        "refused", ("amsgrad", "False", "True"), Script(optimizer=a(torch.optim.AdamW, lr=0.05, amsgrad=True))
    ),
    "no amsgrad any more": Row(
        "taken", ("amsgrad", "True", "False"), before=Script(optimizer=a(torch.optim.AdamW, lr=0.05, amsgrad=True))
    ),
    "learning rate": Row(
        "taken", ("lr of parameter group 0", "0.05", "0.2"), Script(optimizer=a(torch.optim.AdamW, lr=0.2))
    ),
    "a setting of one's own": Row(
        "taken",
        ("share of parameter group 0", "not set", "0.5"),
        Script(optimizer=lambda model: torch.optim.AdamW([{"params": [*model.parameters()], "share": 0.5}], lr=0.05)),
    ),
    # Groups
    "one group for two": Row("refused", ("2 parameter groups", "has 1"), Script(), GROUPED),
    "two groups for one": Row("refused", ("1 parameter group,", "has 2"), GROUPED),
    "fewer parameters": Row(
        "refused",
        ("parameter group 0", "first.weight"),
        Script(optimizer=lambda model: torch.optim.AdamW([*model.parameters()][1:], lr=0.05)),
    ),
    "other members": Row(
        "refused",
        ("parameter group 0", "norm.weight"),
        GROUPED,
        Script(optimizer=lambda model: apart(model, [model.first], [model.norm, model.last])),
    ),
    "the order in a group": Row(
        "nothing", now=Script(optimizer=lambda model: torch.optim.AdamW([*model.parameters()][::-1], lr=0.05))
    ),
    "the order of groups": Row(
        "refused",
        ("parameter group 0",),
        Script(optimizer=lambda model: apart(model, [model.last], [model.first, model.norm])),
        GROUPED,
    ),
    "weight decay of one group": Row(
        "taken",
        ("weight_decay of parameter group 1", "0.01", "0.2"),
        Script(optimizer=lambda model: apart(model, [model.first, model.norm], [model.last], last=0.2)),
        GROUPED,
    ),
    # Schedules
    "a scheduler": Row("refused", ("no scheduler", "StepLR"), BY_SCHEDULER),
    "no scheduler any more": Row("refused", ("no scheduler", "StepLR"), Script(), BY_SCHEDULER),
    "another scheduler": Row(
        "refused", ("StepLR", "CosineAnnealingLR"), Script(scheduler=a(CosineAnnealingLR, T_max=9)), BY_SCHEDULER
    ),
    "a constant of the scheduler": Row(
        "refused", ("gamma", "0.5", "0.9"), Script(scheduler=a(StepLR, step_size=1, gamma=0.9)), BY_SCHEDULER
    ),
    "the peak of one cycle": Row(
        "refused", ("max_lr", "0.2", "0.4"), Script(scheduler=a(OneCycleLR, max_lr=0.4, total_steps=9)), Script(scheduler=CYCLE)
    ),
    "the rate of a scheduler": Row(
        "refused",
        ("0.05", "0.2"),
        Script(optimizer=a(torch.optim.AdamW, lr=0.2), scheduler=BY_SCHEDULER.scheduler),
        BY_SCHEDULER,
    ),
    "weight decay beside a scheduler": Row(
        "taken",
        ("weight_decay",),
        Script(optimizer=a(torch.optim.AdamW, lr=0.05, weight_decay=0.3), scheduler=CYCLE),
        Script(scheduler=CYCLE),
        Script(scheduler=CYCLE, between=set_groups(weight_decay=0.3)),
    ),
    "a beta beside a cycle of the other": Row(
        "taken",
        ("betas",),
        Script(optimizer=a(torch.optim.AdamW, lr=0.05, betas=(0.9, 0.8)), scheduler=CYCLE),
        Script(scheduler=CYCLE),
    ),
    # What training changes itself
    "nothing, one cycle": Row("nothing", (), Script(scheduler=CYCLE), Script(scheduler=CYCLE)),
    "nothing, a lambda": Row(
        "nothing", (), *[Script(scheduler=lambda of: LambdaLR(of, lambda done: 1 / (1 + done)))] * 2
    ),
    "nothing, weight decay of a schedule": Row("nothing", (), *[Script(between=decays_slowly)] * 2),
    "nothing, a rate of the job": Row("nothing", (), *[of_job(schedule=ScheduleSpec(base_lr=0.05, warmup_steps=3))] * 2),
    # The job
    "max_norm": Row("refused", ("gradient.max_norm", "null", "0.5"), of_job(gradient=GradientSpec(max_norm=0.5))),
    "compression": Row("refused", ("gradient.compression", "bf16"), of_job(gradient=GradientSpec(compression="bf16"))),
    "reduce": Row("refused", ("gradient.reduce", "sum"), of_job(gradient=GradientSpec(reduce="sum"))),
    "schedule": Row("refused", ("schedule.decay", "constant"), of_job(schedule=ScheduleSpec(base_lr=0.1, decay="constant"))),
    "deterministic": Row("refused", ("deterministic", "true"), of_job(deterministic=True)),
    "precision": Row("refused", ("another plan",), of_job(precision=PrecisionSpec("bf16"))),
    "seed": Row("refused", ("another plan",), of_job(plan={"seed": 5})),
    "batch": Row("refused", ("another plan",), of_job(plan={"global_batch": 24})),
    "samples of a validation": Row(
        "taken", ("validation.samples", "12"), of_job(validation=ValidationSpec(every_steps=2, samples=12))
    ),
    "stop": Row("taken", ("stop was null", "3"), of_job(stop=StopSpec(patience=3))),
    "gather": Row(
        "taken",
        ("sharding.gather", "fp32", "compute"),
        Script(NORMED, job={"precision": PrecisionSpec("bf16"), "sharding": ShardingSpec(3, gather="compute")}),
        Script(NORMED, job={"precision": PrecisionSpec("bf16"), "sharding": ShardingSpec(3)}),
    ),
    "another stage": Row("nothing", now=of_job(sharding=ShardingSpec(2))),
    "activations": Row("nothing", now=of_job(activations=ActivationsSpec("none", units=("first", "last")))),
    "snapshots": Row("nothing", now=of_job(checkpoint=CheckpointSpec(every_steps=1))),
    # The script's own state
    "a value of the script": Row("taken", ("run.state('mine')",), Script(state=("mine",)), Script(state=("ours",))),
}  # fmt: skip


def train(
    folder: Path,
    script: Script,
    stage: int,
    worker: WorkerState,
    leaves_after: int | None,
    submission: str,
    origin: Origin,
) -> Job:
    """Train a script in a group, from the newest state, and return its job."""
    job = numbers_job(folder, epochs=2, **script.job.get("plan", {}))
    job = replace(
        job,
        run_id="run",
        submission=submission,
        sharding=ShardingSpec(stage),  # type: ignore[arg-type]
        validation=ValidationSpec(every_steps=2),
        data=replace(job.data, validation=job.data.train),
    )
    job = replace(job, **{name: value for name, value in script.job.items() if name != "plan"})
    copies = int(origin == "the memory of a node")
    job = replace(job, checkpoint=CheckpointSpec(every_steps=10**6, snapshot_every_steps=copies))
    worker.join_group()

    def ends(index: int) -> None:
        leaves = index + 1 == leaves_after
        worker.request = Request(leaves=leaves, saves=leaves and origin == "the checkpoint")

    with local_world(CPU):
        run = cpu_run(job, worker=worker)
        try:
            with suppress(LeaveGroup):
                script(run, ends)
            run.hand_over()
        finally:
            run.free()
            torch.use_deterministic_algorithms(False)
    if origin != "the memory of a worker":
        worker.held = None
    return job


def resumed(
    folder: Path, row: Row, stage: int, submissions: tuple[str, str] = ("", ""), origin: Origin = "the checkpoint"
) -> tuple[Job | None, str]:
    """Train the script of a row before its change, and resume it after the change.

    Returns:
        The job if the run came to its end, and the error or the events.
    """
    worker = WorkerState(is_run=True, controller=object())
    train(folder, row.before, stage, worker, SAVED_AT, submissions[0], origin)
    try:
        job = train(folder, row.now, stage, worker, None, submissions[1], origin)
    except UndulaError as error:
        return None, f"refused: {error}"
    events = read_ledger(Store(job.run_url)).events
    assert [event.origin for event in events_of(events, StartEvent)] == [None, origin]
    changes = [each for each in events_of(events, WarningEvent) if each.code in ("settings_taken", "settings_kept")]
    kinds = {each.code.removeprefix("settings_") for each in changes}
    return job, f"{' '.join(sorted(kinds)) or 'nothing'}: {' '.join(each.message for each in changes)}"


def numbers(job: Job) -> str:
    steps = read_ledger(Store(job.run_url)).steps
    return json.dumps({name: steps[name].to_pylist() for name in ("loss", "grad_norm", "lr", "weights_digest")})


@pytest.mark.parametrize("stage", [0, *at_night([3])])
@pytest.mark.parametrize("name", ROWS)
def test_a_change_is_refused_or_taken_with_an_event(name: str, stage: int, tmp_path: Path) -> None:
    row = ROWS[name]
    job, told = resumed(tmp_path / "resumed", row, stage)
    assert told.startswith(f"{row.outcome}: "), told
    for part in row.says:
        assert part in told
    assert (job is None) == (row.outcome == "refused")
    if job is not None and (like := row.like or (row.before if row.outcome == "nothing" else None)):
        whole = train(tmp_path / "whole", like, stage, WorkerState(), None, "", "the checkpoint")
        assert numbers(job) == numbers(whole)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("origin", ["the memory of a worker", "the checkpoint", "the memory of a node"])
def test_a_change_is_noticed_wherever_the_state_comes_from(origin: Origin, stage: int, tmp_path: Path) -> None:
    for name in ("betas", "another optimizer", "compression", "nothing, one cycle"):
        row = ROWS[name]
        _, told = resumed(tmp_path / name, row, stage, origin=origin)
        assert told.startswith(f"{row.outcome}: "), (name, told)


SUBMISSION = ("first", "first")


@pytest.mark.parametrize("stage", [*at_night([0]), 3])
@pytest.mark.parametrize("name", ["betas", "weight decay", "learning rate", "a constant of the scheduler"])
def test_within_a_submission_the_run_keeps_what_it_began_with(name: str, stage: int, tmp_path: Path) -> None:
    """The script cannot have changed, so it makes its settings from the number of workers or the time."""
    row = ROWS[name]
    job, told = resumed(tmp_path / "resumed", row, stage, SUBMISSION)
    assert told.startswith("kept: "), told
    assert job is not None
    whole = train(tmp_path / "whole", row.before, stage, WorkerState(), None, "", "the checkpoint")
    assert numbers(job) == numbers(whole)


def test_what_was_taken_or_kept_is_compared_at_the_next_resume(tmp_path: Path) -> None:
    worker, before, now = WorkerState(is_run=True, controller=object()), ROWS["betas"].before, ROWS["betas"].now
    for script, leaves_after, submission in (
        (before, 2, "1"),
        (now, 3, "1"),
        (now, 4, "2"),
        (now, 5, "3"),
        (before, None, "4"),
    ):
        job = train(tmp_path, script, 0, worker, leaves_after, submission, "the checkpoint")
    events = events_of(read_ledger(Store(job.run_url)).events, WarningEvent)
    changes = [(event.code, event.step) for event in events if event.code.startswith("settings_")]
    assert changes == [("settings_kept", 2), ("settings_taken", 3), ("settings_taken", 5)]


def test_a_state_of_a_former_version_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no record of what was given, and settings of the optimizer are those of the state, as they were then."""
    row = ROWS["betas"]
    with monkeypatch.context() as patch:
        patch.setattr(Given, "values", lambda given: {})
        worker = WorkerState(is_run=True, controller=object())
        train(tmp_path / "resumed", row.before, 0, worker, SAVED_AT, "", "the checkpoint")
    job = train(tmp_path / "resumed", row.now, 0, worker, None, "", "the checkpoint")
    whole = train(tmp_path / "whole", row.before, 0, WorkerState(), None, "", "the checkpoint")
    assert numbers(job) == numbers(whole)


def of_ranked(rank: int, world_size: int, folder: Path, name: str) -> str:
    """Return the message with which a script is refused on two ranks."""
    job = numbers_job(folder / f"rank {rank}")
    job = replace(job, run_url=str(folder / "run"), run_id="run", data=replace(job.data, train=str(folder / "data")))
    run = cpu_run(job, rank, world_size)
    try:
        RANKED[name][1](run, lambda index: None)
    except UsageError as error:
        return str(error)
    finally:
        run.free()
    return ""


RANKED: dict[str, tuple[str, Script]] = {
    "weight decay": (
        "weight_decay of parameter group 0 is 0.1 and 0.0",
        Script(optimizer=lambda model: adamw(model, weight_decay=0.1 * dist.get_rank())),
    ),
    "scheduler": ("gamma=0.5", Script(scheduler=lambda of: StepLR(of, 1, gamma=1 / (1 + dist.get_rank())))),
    "members": (
        "their groups",
        Script(optimizer=lambda model: torch.optim.AdamW([*model.parameters()][dist.get_rank() :])),
    ),
    "nothing": ("", Script()),
}


@pytest.mark.parametrize("name", RANKED)
def test_settings_that_depend_on_the_rank_are_refused(name: str, tmp_path: Path) -> None:
    says, _ = RANKED[name]
    numbers_job(tmp_path)
    messages = on_ranks(2, of_ranked, tmp_path, name)
    assert messages[0] == messages[1]
    assert messages[0].startswith("the script gives other settings on rank 1") == bool(says)
    assert says in messages[0]
