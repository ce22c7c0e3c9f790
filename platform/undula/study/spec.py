"""What a study asks for: which trainings of a job, towards what, and how they share the machines."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import product
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, MinLen
from pydantic import StringConstraints
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.plan.plan import STRICT, Positive
from undula.plan.rules import RULES, RuleName

Optimizer = Literal["own", "sgd", "adam", "adamw", "lars", "lamb"]
CLASSES: Mapping[Optimizer, str] = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lars": "LARS", "lamb": "Lamb"}
"""As undula.plan.rules knows them."""
POWERS: tuple[RuleName, ...] = ("none", "linear", "sqrt", "legw")
"""Rules that go with any optimizer: whether a power of the batch holds there is what a study asks. The others' formulas are about some
optimizers alone."""


@checked_dataclass(frozen=True, config=STRICT)
class LogRange:
    """Learning rates at equal ratios, both ends among them."""

    low: Annotated[float, Gt(0)]
    """The lowest."""
    high: Annotated[float, Gt(0)]
    """The highest."""
    points: Annotated[int, Ge(3)] = 9
    """How many, for a grid; an optimum shows between two others."""

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g}, not under high ({self.high:g}): exchange them")
        if self.high < 1.01 * self.low:
            raise ValueError(f"low is {self.low:g} and high {self.high:g}, which is one learning rate: give base_lrs")

    def values(self) -> tuple[float, ...]:
        """To six digits, so that a range which was widened by whole steps has the same rates where it was before."""
        ratio = self.high / self.low
        return tuple(float(f"{self.low * ratio ** (point / (self.points - 1)):.6g}") for point in range(self.points))


@checked_dataclass(frozen=True, config=STRICT)
class StudySpec:
    """Trainings of one job with other batches, learning rates, rules, warmups, optimizers and seeds: each with each."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the study's directory below `runs`."""
    job: Annotated[str, MinLen(1)]
    """YAML of the job, relative to the study's; what a study does not set is as the job has it."""
    batches: tuple[Positive, ...]
    """Samples per optimizer step (plan.global_batch). Rules scale from the first."""
    base_lrs: tuple[Annotated[float, Gt(0)], ...] = ()
    """Learning rates at the top of the schedule; or give base_lr_range."""
    base_lr_range: LogRange | None = None
    """The same as a range."""
    rules: tuple[RuleName, ...] = ("none",)
    """How the learning rate follows the batch; `none` tries each base rate at each batch, which finds the best."""
    warmups: tuple[Annotated[int, Ge(0)], ...] = ()
    """Samples of warmup (schedule.warmup_samples), before the rule; by default the job's."""
    optimizers: tuple[Optimizer, ...] = ("own",)
    """config.optimizer.name of the job, of which undula.make_optimizer makes the optimizer; or `own`, whatever the script makes."""
    seeds: tuple[int, ...] = (0,)
    """plan.seed. Several show what chance does to a loss."""
    metric: Literal["validation_loss", "training_loss"] = "validation_loss"
    """What trainings are judged by; the training loss is the mean since the last measurement."""
    target: float | None = None
    """Loss that a training is to reach: the study counts steps and samples until then. Without it trainings are judged by their last
    loss alone."""
    samples: Positive | None = None
    """Samples of each training, whatever its batch; by default those of the job."""
    measurements: Annotated[int, Ge(2)] = 20
    """Times that a training measures the metric, at equal distances in samples."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values of the job that all trainings have in place of its own: plan.virtual_workers: 8."""
    search: Literal["grid", "random", "adaptive"] = "grid"
    """All trainings; so many drawn of them; or each where those before promise most."""
    trials: Positive | None = None
    """How many, for a random search; most for each batch with its optimizer, rule and warmup, for an adaptive one. These two need it,
    and a grid has as many as it has."""
    scheduler: Literal["asha", "none"] = "none"
    """Whether trainings that lag behind are stopped early, compared with other learning rates of the same batch, optimizer, rule, warmup
    and seed (ASHA, Li et al. 2020, arXiv:1810.05934)."""
    first_rung: Positive | None = None
    """Samples after which ASHA compares for the first time; by default rung_ratio squared goes into a training."""
    rung_ratio: Annotated[int, Ge(2)] = 3
    """Of the trainings that come to a rung one in so many goes on, for so many times the samples."""
    keep_models: bool = False
    """Whether the checkpoints of trainings that have ended are kept."""
    max_concurrent: Positive | None = None
    """Most trainings at once; by default as many as the cluster holds."""
    worker_hour: Annotated[float, Ge(0)] | None = None
    """Dollars that a worker costs in an hour, for the costs in the report; by default it has none."""
    packed: Positive | None = None
    """Trainings that share what one worker of the job has (workers.cpus, workers.gpus), each a single process: for small models. By
    default each is an elastic training with the job's workers."""

    def __post_init__(self) -> None:
        self._refuse_axes()
        self._refuse_rules()
        if self.search != "grid" and self.trials is None:
            raise ValueError(f"trials is missing: search: {self.search} takes a number of them")
        if self.search == "grid" and self.trials is not None:
            raise ValueError(
                f"trials is {self.trials}, and a grid has as many as it has: leave it out, or give a search"
            )
        if self.search == "adaptive" and self.base_lr_range is None:
            raise ValueError("base_lrs is a list, in which search: adaptive cannot move: give base_lr_range")
        if self.first_rung is not None and self.scheduler != "asha":
            raise ValueError(
                f"first_rung is {self.first_rung}, and scheduler none stops nothing: give scheduler: asha, or leave it out"
            )

    @property
    def rung(self) -> int | None:
        """Samples after which ASHA compares for the first time; None without it, or where the samples are the job's."""
        if self.scheduler != "asha" or self.samples is None:
            return None
        return self.first_rung or max(self.samples // self.rung_ratio**2, 1)

    def _refuse_axes(self) -> None:
        if bool(self.base_lrs) == (self.base_lr_range is not None):
            found = "is empty" if not self.base_lrs else "and base_lr_range are both given"
            raise ValueError(f"base_lrs {found}: give one of base_lrs and base_lr_range")
        axes: Mapping[str, Sequence[Any]] = {
            "batches": self.batches,
            "base_lrs": self.rates,
            "rules": self.rules,
            "warmups": self.warmup_axis,
            "optimizers": self.optimizers,
            "seeds": self.seeds,
        }
        for key, values in axes.items():
            if not values:
                raise ValueError(f"{key} is empty, which leaves nothing to train: give one or more")
            told = [
                f"{value:.6g}" if isinstance(value, float) else str(value) for value in values
            ]  # as names of trials do
            if twice := [text for text in told if told.count(text) > 1]:
                raise ValueError(f"{key} has {twice[0]} twice: keep one")

    def _refuse_rules(self) -> None:
        scaling = [rule for rule in self.rules if rule != "none"]
        if scaling and len(self.batches) == 1:
            raise ValueError(
                f"batches is {self.batches[0]} alone, where {scaling[0]} asks for another to scale to: "
                f"give two or more, or leave out rules"
            )
        for rule in self.rules:
            if not any(_goes_with(rule, optimizer) for optimizer in self.optimizers):
                raise ValueError(
                    f"rules has {rule}, which is for {' and '.join(_optimizers_of(rule)[1:])} and not for "
                    f"{' or '.join(self.optimizers)}: leave it out, or give another optimizer"
                )
        for optimizer in self.optimizers:
            if not any(_goes_with(rule, optimizer) for rule in self.rules):
                raise ValueError(
                    f"optimizers has {optimizer}, with which no rule of rules goes: leave it out, or add one"
                )

    @property
    def rates(self) -> tuple[float, ...]:
        """The base learning rates of a grid."""
        return self.base_lr_range.values() if self.base_lr_range else self.base_lrs

    @property
    def warmup_axis(self) -> tuple[int, ...]:
        """The warmups that are tried; no warmup stands for a job's that is not known."""
        return self.warmups or (0,)

    @property
    def sets(self) -> Mapping[str, str]:
        """The job's keys that a study sets for each training, and its own key for each."""
        keys = {
            "name": "name",
            "plan.global_batch": "batches",
            "plan.seed": "seeds",
            "schedule.base_lr": "base_lr_range" if self.base_lr_range else "base_lrs",
            "schedule.base_batch": "batches",
            "schedule.batch_rule": "rules",
            "validation.every_steps": "measurements",
            "checkpoint.keep": "keep_models",
        }
        if self.samples:
            keys |= {"plan.epochs": "samples", "plan.max_steps": "samples"}
        if self.warmups:
            keys |= {f"schedule.warmup_{unit}": "warmups" for unit in ("samples", "epochs", "steps")}
        if self.optimizers != ("own",):
            keys["config.optimizer.name"] = "optimizers"
        return keys

    def pairs(self) -> tuple[tuple[Optimizer, RuleName], ...]:
        """Optimizers and the rules that go with them: what is trained of their product."""
        return tuple(pair for pair in product(self.optimizers, self.rules) if _goes_with(pair[1], pair[0]))


def _optimizers_of(rule: RuleName) -> tuple[Optimizer, ...]:
    holds_for = RULES[rule].holds_for
    is_any = rule in POWERS or holds_for is None
    return ("own", *(name for name, kind in CLASSES.items() if is_any or kind in (holds_for or ())))


def _goes_with(rule: RuleName, optimizer: Optimizer) -> bool:
    return optimizer in _optimizers_of(rule)
