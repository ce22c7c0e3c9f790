"""The spec of a study: the trainings of a job that it compares, the metric that it compares them by, and the resources that it uses."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import product
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, MinLen
from pydantic import StringConstraints
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import NAME, STRICT
from undula.plan.plan import Positive
from undula.plan.rules import RULES, RuleName

Optimizer = Literal["own", "sgd", "adam", "adamw", "lars", "lamb"]
CLASSES: Mapping[Optimizer, str] = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lars": "LARS", "lamb": "Lamb"}
"""Names under which undula.plan.rules knows the optimizers."""


@checked_dataclass(frozen=True, config=STRICT)
class LogRange:
    """Learning rates at equal ratios, with both ends included."""

    low: Annotated[float, Gt(0)]
    """Lowest learning rate."""
    high: Annotated[float, Gt(0)]
    """Highest learning rate."""
    points: Annotated[int, Ge(3)] = 9
    """Number of learning rates in a grid. An optimum is only seen between two other rates."""

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g}, not below high ({self.high:g}); exchange them")
        if self.high < 1.01 * self.low:
            raise ValueError(
                f"low is {self.low:g} and high is {self.high:g}, which is one learning rate; give base_lrs"
            )

    def values(self) -> tuple[float, ...]:
        """The learning rates, to six digits: a range that is widened by whole steps keeps its former rates."""
        ratio = self.high / self.low
        return tuple(float(f"{self.low * ratio ** (point / (self.points - 1)):.6g}") for point in range(self.points))


@checked_dataclass(frozen=True, config=STRICT)
class StudySpec:
    """A comparison of trainings of one job. Each batch is combined with each learning rate, rule, warmup, optimizer and seed."""

    name: Annotated[str, StringConstraints(pattern=NAME)]
    """Name of the study's directory below the job's `runs`."""
    job: Annotated[str, MinLen(1)]
    """Path of the job's YAML, relative to the study's. The job gives every value that the study does not set."""
    batches: tuple[Positive, ...]
    """Samples per optimizer step (plan.global_batch). Rules scale from the first batch."""
    base_lrs: tuple[Annotated[float, Gt(0)], ...] = ()
    """Learning rates at the top of the schedule, before the rule. Give either these or base_lr_range."""
    base_lr_range: LogRange | None = None
    """Range of the learning rates, in place of base_lrs."""
    rules: tuple[RuleName, ...] = ("none",)
    """Rules by which the learning rate follows the batch. `none` tries each base rate at each batch, and so finds the best rate of each."""
    warmups: tuple[Annotated[int, Ge(0)], ...] = ()
    """Lengths of the warmup in samples (schedule.warmup_samples), before the rule; by default the job's."""
    optimizers: tuple[Optimizer, ...] = ("own",)
    """Optimizers: values of the job's config.optimizer.name, for scripts that call undula.make_optimizer, or `own` for the optimizer that
    the script makes."""
    seeds: tuple[int, ...] = (0,)
    """Seeds (plan.seed). Several seeds show how much a loss depends on chance."""
    metric: Literal["validation_loss", "training_loss"] = "validation_loss"
    """Loss by which trainings are compared. The training loss is the mean over the steps since the last measurement."""
    target: float | None = None
    """Loss that a training must reach: the study counts the steps and samples until then. Without a target, trainings are compared by
    their last loss only."""
    samples: Positive | None = None
    """Samples of each training, the same for every batch; by default those of the job."""
    measurements: Annotated[int, Ge(2)] = 20
    """Number of measurements of the metric in a training, at equal distances in samples."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values that replace the job's in all trainings, such as plan.virtual_workers: 8."""
    search: Literal["grid", "random", "adaptive"] = "grid"
    """Choice of the trainings: `grid` trains all combinations, `random` draws some of them, and `adaptive` chooses each learning rate
    by the losses of the trainings before it."""
    trials: Positive | None = None
    """Number of trainings of a random search; maximum number for each batch with its optimizer, rule and warmup of an adaptive search.
    Both need it, and a grid does not take it."""
    scheduler: Literal["asha", "none"] = "none"
    """Early stopping: `asha` stops trainings that lag behind other learning rates of the same batch, optimizer, rule, warmup and seed
    (Li et al. 2020, arXiv:1810.05934)."""
    first_rung: Positive | None = None
    """Samples after which ASHA compares trainings for the first time; by default `samples` divided by the square of rung_ratio."""
    rung_ratio: Annotated[int, Ge(2)] = 3
    """Ratio of ASHA: of so many trainings that reach a rung one continues, and the next rung has so many times the samples."""
    keep_models: bool = False
    """Whether to keep the checkpoints of trainings that have ended."""
    max_concurrent: Positive | None = None
    """Maximum number of trainings at once; by default as many as the cluster has room for."""
    worker_hour: Annotated[float, Ge(0)] | None = None
    """Price of a worker in dollars per hour, for the costs in the report. Without it the report has no costs."""
    packed: Positive | None = None
    """Number of trainings that share the resources of one worker of the job (workers.cpus, workers.gpus). Each is then a single process,
    which suits small models. By default each training is elastic and has the job's workers."""

    def __post_init__(self) -> None:
        self._refuse_axes()
        self._refuse_rules()
        if self.search != "grid" and self.trials is None:
            raise ValueError(f"trials is missing; search={self.search} needs a number of trials")
        if self.search == "grid" and self.trials is not None:
            raise ValueError(
                f"trials={self.trials} cannot be combined with search=grid, which trains everything; remove it, or give another search"
            )
        if self.search == "adaptive" and self.base_lr_range is None:
            raise ValueError("base_lrs is a list, and search=adaptive needs a range to search in; give base_lr_range")
        if self.first_rung is not None and self.scheduler != "asha":
            raise ValueError(
                f"first_rung={self.first_rung} cannot be combined with scheduler=none; give scheduler: asha, or remove first_rung"
            )

    @property
    def share(self) -> float:
        """Share of a worker's resources that each process of a trial reserves."""
        return 1 / (self.packed or 1)

    @property
    def rung(self) -> int | None:
        """Samples after which ASHA compares trainings for the first time; None without ASHA, or if the study does not set `samples`."""
        if self.scheduler != "asha" or self.samples is None:
            return None
        return self.first_rung or max(self.samples // self.rung_ratio**2, 1)

    def _refuse_axes(self) -> None:
        """Refuse axes that are empty or name a value twice."""
        if bool(self.base_lrs) == (self.base_lr_range is not None):
            problem = "is empty" if not self.base_lrs else "and base_lr_range are both given"
            raise ValueError(f"base_lrs {problem}; give either base_lrs or base_lr_range")
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
                raise ValueError(f"{key} is empty, which leaves nothing to train; give one value or more")
            # Two values that the names of trials write alike would be one run directory.
            texts = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
            if twice := [text for text in texts if texts.count(text) > 1]:
                raise ValueError(f"{key} has {twice[0]} twice; keep one")

    def _refuse_rules(self) -> None:
        """Refuse rules that have nothing to scale, and rules or optimizers that no training would use."""
        scaling = [rule for rule in self.rules if rule != "none"]
        if scaling and len(self.batches) == 1:
            raise ValueError(
                f"batches has {self.batches[0]} only, and the rule {scaling[0]} needs another batch to scale to; "
                f"give two batches or more, or remove rules"
            )
        for rule in self.rules:
            if not any(_goes_with(rule, optimizer) for optimizer in self.optimizers):
                raise ValueError(
                    f"rules has {rule}, which is for {' and '.join(_optimizers_of(rule)[1:])} and not for "
                    f"{' or '.join(self.optimizers)}; remove it, or give another optimizer"
                )
        for optimizer in self.optimizers:
            if not any(_goes_with(rule, optimizer) for rule in self.rules):
                raise ValueError(
                    f"optimizers has {optimizer}, for which none of the rules is; remove it, or add a rule"
                )

    @property
    def rates(self) -> tuple[float, ...]:
        """Base learning rates of a grid."""
        return self.base_lr_range.values() if self.base_lr_range else self.base_lrs

    @property
    def warmup_axis(self) -> tuple[int, ...]:
        """Warmups that are tried, in samples; 0 if they are the job's and not known yet."""
        return self.warmups or (0,)

    @property
    def sets(self) -> Mapping[str, str]:
        """Keys of the job that the study sets for each training, with the study's key that each is set from."""
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
        """Optimizers with the rules that may be tried with them."""
        return tuple(pair for pair in product(self.optimizers, self.rules) if _goes_with(pair[1], pair[0]))


def _optimizers_of(rule: RuleName) -> tuple[Optimizer, ...]:
    """Optimizers with which a rule may be tried; `own` is the first.

    A power of the batch may be tried with any optimizer, since a study tests whether it holds. The other rules are derived for certain
    optimizers only.
    """
    holds_for = RULES[rule].holds_for
    is_any = RULES[rule].changes_rate_alone(warmup=0) or holds_for is None
    return ("own", *(name for name, kind in CLASSES.items() if is_any or kind in (holds_for or ())))


def _goes_with(rule: RuleName, optimizer: Optimizer) -> bool:
    return optimizer in _optimizers_of(rule)
