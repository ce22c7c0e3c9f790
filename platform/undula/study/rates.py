"""A study's learning rates, batch by batch: what came of each, the best one, and the one that got to the target first. Pure.

Trainings that differ in their seed alone are one point, whose loss is their mean. A training that was stopped had lost against others
after as many samples: it bounds an optimum and cannot be one. One that diverged or failed is never a number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, log, log2, sqrt
from typing import Literal

import numpy as np
from scipy.special import ndtri, stdtrit

from undula.plan.rules import RULES, RuleName, changes_rate_alone
from undula.study.fits import Edge, Floats, Interval, Optimum, PowerLaw, about_lowest, best_rate, fit_power_law
from undula.study.spec import Optimizer, StudySpec
from undula.study.trials import TrialRecord

Outcome = Literal["complete", "stopped", "diverged", "failed", "unfinished"]
ENDED: tuple[Outcome, ...] = ("complete", "stopped", "diverged")
RESAMPLES = 200
SAME = 1e-3
"""Relative difference of two learning rates that are one, but for rounding."""


@dataclass(frozen=True)
class Group:
    """Trainings that may be compared with each other: all that findings are about."""

    optimizer: Optimizer
    warmup: int
    """Samples, before the rule."""

    @property
    def title(self) -> str:
        return f"{optimizer_words(self.optimizer)}, " + (
            f"warmup {self.warmup:,} samples" if self.warmup else "no warmup"
        )

    @property
    def key(self) -> str:
        """Of its files."""
        return f"{self.optimizer}-w{self.warmup}"


def optimizer_words(optimizer: Optimizer) -> str:
    """`adamw`, or what `own` stands for."""
    return "the job's optimizer" if optimizer == "own" else optimizer


@dataclass(frozen=True)
class RatePoint:
    """All seeds of one learning rate at one batch."""

    rate: float
    """At the top of the schedule, after the rule; the mean over seeds of a rule that measures."""
    base_rate: float
    """Before the rule."""
    outcome: Outcome
    losses: Mapping[int, float]
    """Last losses by seed, of trainings that are complete."""
    records: tuple[TrialRecord, ...]

    @property
    def loss(self) -> float:
        """Mean over seeds; infinite unless the point is complete."""
        return sum(self.losses.values()) / len(self.losses) if self.outcome == "complete" else inf

    @property
    def has_learned(self) -> bool:
        """Whether the loss is below the first ones that were measured."""
        return self.loss < self.first_loss

    @property
    def first_loss(self) -> float:
        """Mean of the first losses, over its trainings; infinite where there is none."""
        firsts = [record.curve[0].loss for record in self.records if record.curve and isfinite(record.curve[0].loss)]
        return sum(firsts) / len(firsts) if firsts else inf

    @property
    def deviation(self) -> float | None:
        """Of one seed's loss, with n - 1; None with less than two."""
        return float(np.std(list(self.losses.values()), ddof=1)) if len(self.losses) > 1 else None


@dataclass(frozen=True)
class Fewest:
    """The learning rate that takes the fewest steps to the target, on average over seeds all of which get there."""

    rate: float
    steps: tuple[float, ...]
    """One a seed."""
    samples: tuple[float, ...]
    edge: Edge | None
    """Where a rate beyond those that were tried might take fewer."""

    @property
    def mean_steps(self) -> float:
        return sum(self.steps) / len(self.steps)

    @property
    def mean_samples(self) -> float:
        return sum(self.samples) / len(self.samples)


@dataclass(frozen=True)
class AtBatch:
    """A batch's learning rates."""

    batch: int
    points: tuple[RatePoint, ...]
    """By rate."""
    optimum: Optimum | None
    """By the last loss; None where no training is complete, or none has learned."""
    problem: str
    """Why there is no optimum, or why it is a bound: a sentence."""
    fewest: Fewest | None
    """None where nothing got to the target by training, or there is none."""

    @property
    def lowest(self) -> RatePoint | None:
        """The point with the lowest loss that was measured."""
        complete = [point for point in self.points if point.outcome == "complete"]
        return min(complete, key=lambda point: point.loss) if complete else None

    @property
    def diverged_from(self) -> float:
        """The lowest rate above the best at which trainings diverged; infinite where none did."""
        best = self.lowest.rate if self.lowest else 0.0
        return min((each.rate for each in self.points if each.outcome == "diverged" and each.rate > best), default=inf)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({seed for point in self.points for seed in point.losses}))

    def rates_by_seed(self) -> tuple[float, ...]:
        """The best rate of each seed by itself, where it lies inside the range."""
        found = (optimum_of(self.batch, _with_seeds(self.points, (seed,))) for seed in self.seeds)
        return tuple(each.rate for each in found if each and each.interior)


def exponent_of(rule: RuleName) -> float | None:
    """The power of the batch that the rule gives the learning rate; None for one that measures."""
    return None if RULES[rule].is_measured else log2(factor_of(rule, 4.0)) / 2  # of 4, whose roots are exact


def factor_of(rule: RuleName, kappa: float) -> float:
    """On the learning rate, `kappa` base batches up; for a rule that does not measure."""
    return RULES[rule].scaled(kappa, None).lr


def groups_of(spec: StudySpec) -> tuple[Group, ...]:
    return tuple(Group(optimizer, warmup) for optimizer in spec.optimizers for warmup in spec.warmup_axis)


def tunings_of(spec: StudySpec, group: Group) -> tuple[tuple[RuleName, ...], ...]:
    """The group's rules, those together whose trainings are points of one curve; the one that shows the free optimum is first."""
    rules = [rule for optimizer, rule in spec.pairs() if optimizer == group.optimizer]
    alone = tuple(rule for rule in rules if changes_rate_alone(rule, group.warmup))
    others = [(rule,) for rule in rules if rule not in alone]
    return (alone, *others) if alone else tuple(others)


def tune(
    spec: StudySpec, records: Iterable[TrialRecord], group: Group, rules: Sequence[RuleName]
) -> tuple[AtBatch, ...]:
    """The learning rates of a group under some rules, by batch. At the base batch all rules are one, whichever was trained there."""
    base = spec.batches[0]
    mine = [
        record
        for record in records
        if (record.trial.optimizer, record.trial.warmup) == (group.optimizer, group.warmup)
        and (record.trial.rule in rules or record.trial.batch == base)
    ]
    batches = sorted({*spec.batches, *(record.trial.batch for record in mine)})
    return tuple(
        at_batch(batch, rate_points([each for each in mine if each.trial.batch == batch], base), spec.target)
        for batch in batches
    )


def rate_points(records: Iterable[TrialRecord], base: int) -> tuple[RatePoint, ...]:
    """Records of one batch as points, by rate; `base` is the base batch."""
    by_rate: dict[str, list[TrialRecord]] = {}
    for record in records:
        trial = record.trial
        is_fixed = trial.batch == base or changes_rate_alone(trial.rule, trial.warmup)
        by_rate.setdefault(f"{_asked_rate(record, base) if is_fixed else trial.base_lr:.5g}", []).append(record)
    return tuple(sorted((_point(tuple(found), base) for found in by_rate.values()), key=lambda point: point.rate))


def at_batch(batch: int, points: tuple[RatePoint, ...], target: float | None) -> AtBatch:
    """What a batch's points say."""
    optimum = optimum_of(batch, points)
    fewest = _fewest(points, target) if target is not None else None
    return AtBatch(batch, points, optimum, _problem(batch, points, optimum), fewest)


def optimum_of(batch: float, points: Sequence[RatePoint]) -> Optimum | None:
    """The best rate of a batch; None where no training is complete, or none has learned: whichever is lowest then is so by chance.

    A neighbour that was stopped, or learned nothing, lost, so that the optimum is inside, but its loss is no point of a parabola.
    """
    tried = [point for point in points if point.outcome in ENDED]
    if not any(point.has_learned for point in tried):
        return None
    lost = [point.outcome == "stopped" or (point.outcome == "complete" and not point.has_learned) for point in tried]
    return best_rate(batch, [point.rate for point in tried], [point.loss for point in tried], lost)


@dataclass(frozen=True)
class LossAt:
    """What is known of the loss of a learning rate."""

    loss: float | None = None
    outcome: Outcome | None = None
    """Of the trainings that tell it; None where there are none."""
    is_between: bool = False
    """Whether it is on the straight line between two that were trained: too high in a round valley, too low before a cliff."""


def loss_at(points: Sequence[RatePoint], rate: float) -> LossAt:
    """The loss of a learning rate: measured, or on the straight line in log rate between the two that were trained about it.

    Nothing is known beyond the rates that were trained, nor beside one that is not complete.
    """
    if same := next((point for point in points if abs(point.rate / rate - 1) < SAME), None):
        return LossAt(same.loss if same.outcome == "complete" else None, same.outcome)
    ended = [point for point in points if point.outcome in ENDED]
    below = max((point for point in ended if point.rate < rate), key=lambda point: point.rate, default=None)
    above = min((point for point in ended if point.rate > rate), key=lambda point: point.rate, default=None)
    if below is None or above is None or (below.outcome, above.outcome) != ("complete", "complete"):
        return LossAt()
    share = log(rate / below.rate) / log(above.rate / below.rate)
    return LossAt(below.loss + share * (above.loss - below.loss), "complete", is_between=True)


def fit_exponent(batches: Sequence[AtBatch]) -> PowerLaw:
    """The power law of the best learning rate, with one optimum a batch and an interval of the exponent that accounts for seeds.

    The interval is the hull of two, widened by what the grid leaves open: Student's over the batches, in whose scatter about the line
    all chance is, seeds' too; and, with two seeds or more, a bootstrap of the seeds of each batch, so that optima which happen to lie
    on a line do not look certain. A bootstrap of n seeds is widened by sqrt(n / (n - 1)), as their own mean is too near to them, and by
    Student's quantile over the normal one. Seeds are no points of their own: where the optima bend away from a line, more seeds would
    make the interval narrow about a slope that is wrong.

    Raises:
        ValueError: fewer than two different batches have an optimum inside their range.
    """
    fit = fit_power_law([each.optimum for each in batches if each.optimum])
    used = [each for each in batches if each.optimum and each.optimum.interior]
    gaps = np.array([optimum.open for optimum in fit.used])
    away = np.log([each.batch for each in used])
    away = away - away.mean()
    open_by = float(np.abs(away) @ gaps / (away @ away))
    low, high = fit.interval.low, fit.interval.high
    seeds = min(len(each.seeds) for each in used)
    if seeds > 1 and len(used) > 2:
        drawn = _exponents_of_draws(used)
        if len(drawn):
            free = sum(len(each.seeds) - 1 for each in used)
            wider = sqrt(seeds / (seeds - 1)) * float(stdtrit(free, 0.975) / ndtri(0.975))
            below, above = np.quantile(drawn, [0.025, 0.975]) - fit.exponent
            low, high = min(low, fit.exponent + wider * float(below)), max(high, fit.exponent + wider * float(above))
    return replace(fit, interval=Interval(low - open_by, high + open_by), level=fit.level + float(gaps.mean()))


def _exponents_of_draws(used: Sequence[AtBatch], seed: int = 0) -> Floats:
    """Exponents with each batch's seeds drawn anew; an optimum that leaves its range in a draw is left out of it."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(RESAMPLES):
        optima = []
        for each in used:
            drawn = _with_seeds(each.points, rng.choice(each.seeds, len(each.seeds)).tolist())
            optimum = optimum_of(each.batch, drawn)
            optima += [optimum] if optimum and optimum.interior else []
        if len(optima) > 1:
            x, y = np.log([each.batch for each in optima]), np.log([each.rate for each in optima])
            found.append(float((x - x.mean()) @ y / ((x - x.mean()) @ (x - x.mean()))))
    return np.array(found)


def _with_seeds(points: Sequence[RatePoint], seeds: Sequence[int]) -> list[RatePoint]:
    """Points with the losses of some seeds, one as often as it is named; those which have none of them are left out."""
    found = []
    for point in points:
        losses = [point.losses[seed] for seed in seeds if seed in point.losses]
        if losses or point.outcome != "complete":
            found.append(replace(point, losses=dict(enumerate(losses))))
    return found


def _asked_rate(record: TrialRecord, base: int) -> float:
    trial = record.trial
    is_measured = RULES[trial.rule].is_measured
    return trial.base_lr * (1.0 if is_measured else factor_of(trial.rule, trial.batch / base))


def _point(records: tuple[TrialRecord, ...], base: int) -> RatePoint:
    known = [record.lr for record in records if isfinite(record.lr) and record.lr > 0]
    measures = any(RULES[record.trial.rule].is_measured for record in records)
    rate = sum(known) / len(known) if measures and known else _asked_rate(records[0], base)
    losses = {
        record.trial.seed: record.loss for record in records if record.state == "complete" and isfinite(record.loss)
    }
    return RatePoint(rate, records[0].trial.base_lr, _outcome(records, bool(losses)), losses, records)


def _outcome(records: Sequence[TrialRecord], has_losses: bool) -> Outcome:
    """One seed that diverged makes a rate unstable, and one that was stopped makes the mean of the others too good."""
    states = {record.state for record in records}
    unusable = any(record.state == "complete" and not isfinite(record.loss) for record in records)
    if "diverged" in states or unusable:
        return "diverged"
    if "stopped" in states:
        return "stopped"
    if has_losses:
        return "complete"
    return "unfinished" if states & {"waiting", "running"} else "failed"


def _fewest(points: Sequence[RatePoint], target: float) -> Fewest | None:
    tried = [point for point in points if point.outcome in ENDED]
    rates, diverged = [point.rate for point in tried], [point.outcome == "diverged" for point in tried]
    best: Fewest | None = None
    for at, point in enumerate(tried):
        ended = [record for record in point.records if record.state in ("complete", "stopped")]
        steps = tuple(record.steps_to(target) for record in ended)
        if point.outcome == "diverged" or not steps or not all(0 < each < inf for each in steps):
            continue
        _about, edge = about_lowest(rates, at, diverged)
        found = Fewest(point.rate, steps, tuple(record.samples_to(target) for record in ended), edge)
        best = found if best is None or found.mean_steps < best.mean_steps else best
    return best


def is_open(fewest: Fewest) -> bool:
    """Whether a rate that was not tried may take fewer steps by more than what one beside divergence leaves open."""
    return fewest.edge not in (None, "diverged")


def _problem(batch: int, points: Sequence[RatePoint], optimum: Optimum | None) -> str:
    outcomes = {point.outcome for point in points}
    if optimum is None:
        if outcomes == {"diverged"}:
            return f"every learning rate diverged at batch {batch:,}: lower ones are needed"
        if "complete" in outcomes:
            firsts = [point.first_loss for point in points if isfinite(point.first_loss)]
            several = any(len(point.losses) > 1 for point in points)
            who, mean = ("learning rate", ", the mean over seeds") if several else ("training", "")
            return (
                f"no {who} at batch {batch:,} ended below where it began ({sum(firsts) / len(firsts):.4g}{mean}): "
                "other learning rates are needed, or more samples"
            )
        return f"no training at batch {batch:,} is complete" if points else f"nothing was trained at batch {batch:,}"
    if optimum.edge == "diverged":
        return (
            f"at batch {batch:,} the best learning rate that was tried ({optimum.rate:.4g}) is beside one that diverged: "
            f"more between the two are needed"
        )
    if optimum.edge == "alone":
        return (
            f"at batch {batch:,} the rates about the best learning rate that was tried ({optimum.rate:.4g}) do not bracket it: "
            f"lower and higher ones are needed"
        )
    if optimum.edge:
        side = "higher" if optimum.edge == "highest" else "lower"
        return (
            f"at batch {batch:,} the best learning rate ({optimum.rate:.4g}) is at the {optimum.edge} end of those that were tried: "
            f"{side} ones are needed"
        )
    return ""
