"""Learning rates of a study at each batch: their losses, the best rate, and the rate that reached the target first. Pure.

Trials that differ only in their seed are one point, whose loss is their mean. The points of a batch are compared over the same seeds. A
trial is stopped if its loss is higher than that of others after as many samples; its rate bounds the optimum, but is not the optimum
itself. The loss of a trial that diverged or failed is not used.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, log
from typing import Literal, assert_never

import numpy as np

from undula.plan.rules import RULES, RuleName
from undula.study.fits import Edge, Optimum, about_lowest, best_rate
from undula.study.seeds import common_seeds
from undula.study.spec import Optimizer, StudySpec
from undula.study.trials import TrialRecord

Outcome = Literal["complete", "stopped", "diverged", "failed", "unfinished"]
ENDED: tuple[Outcome, ...] = ("complete", "stopped", "diverged")
"""Outcomes that are evidence about a learning rate."""
SAME = 1e-3
"""Relative difference up to which two learning rates count as equal, because of rounding."""


@dataclass(frozen=True)
class Group:
    """Trials that may be compared with each other, because they have the same optimizer and warmup."""

    optimizer: Optimizer
    warmup: int
    """Length of the warmup in samples, before scaling by the rule."""

    @property
    def title(self) -> str:
        """Name of the group in the report."""
        return f"{optimizer_words(self.optimizer)}, " + (
            f"warmup {self.warmup:,} samples" if self.warmup else "no warmup"
        )

    @property
    def key(self) -> str:
        """Prefix of the names of the group's files."""
        return f"{self.optimizer}-w{self.warmup}"


def optimizer_words(optimizer: Optimizer) -> str:
    """Return the name of an optimizer in the report, such as `adamw`."""
    return "the job's optimizer" if optimizer == "own" else optimizer


@dataclass(frozen=True)
class RatePoint:
    """Trials of one learning rate at one batch, with all seeds."""

    rate: float
    """Learning rate at the top of the schedule, after scaling by the rule. For a measured rule, it is the mean over seeds."""
    base_rate: float
    """Learning rate before scaling by the rule."""
    outcome: Outcome
    losses: Mapping[int, float]
    """Last losses of the complete trials by seed; in an AtBatch, only those of the compared seeds."""
    records: tuple[TrialRecord, ...]

    @property
    def loss(self) -> float:
        """Mean of the last losses over seeds, or infinity unless the point is complete."""
        return sum(self.losses.values()) / len(self.losses) if self.outcome == "complete" else inf

    @property
    def has_learned(self) -> bool:
        """Whether the loss is below the mean of the first losses."""
        return self.loss < self.first_loss

    @property
    def first_loss(self) -> float:
        """Mean of the first losses of the trials, or infinity if there is none."""
        firsts = [record.curve[0].loss for record in self.records if record.curve and isfinite(record.curve[0].loss)]
        return sum(firsts) / len(firsts) if firsts else inf

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation (with n - 1) of the loss over seeds, or None with fewer than two seeds."""
        return float(np.std(list(self.losses.values()), ddof=1)) if len(self.losses) > 1 else None


@dataclass(frozen=True)
class Fewest:
    """Learning rate that takes the fewest steps to the target, as a mean over seeds. All seeds must reach the target."""

    rate: float
    steps: tuple[float, ...]
    """Steps to the target, one value for each seed."""
    samples: tuple[float, ...]
    """Samples to the target, one value for each seed."""
    seeds: tuple[int, ...]
    edge: Edge | None
    """Reason why an untried rate may take fewer steps; None if the tried rates bracket this one."""

    def steps_of(self, seeds: Iterable[int]) -> list[float]:
        """Return the steps to the target with the given seeds."""
        by_seed = dict(zip(self.seeds, self.steps, strict=True))
        return [by_seed[seed] for seed in seeds]

    @property
    def mean_steps(self) -> float:
        return sum(self.steps) / len(self.steps)

    @property
    def mean_samples(self) -> float:
        return sum(self.samples) / len(self.samples)


@dataclass(frozen=True)
class AtBatch:
    """Learning rates of one batch."""

    batch: int
    points: tuple[RatePoint, ...]
    """Points in ascending order of their rates."""
    optimum: Optimum | None
    """Best rate by the last loss; None if no trial is complete, or if none has learned."""
    problem: str
    """Reason why there is no optimum, or why it is only a bound; empty otherwise."""
    fewest: Fewest | None
    """Rate with the fewest steps to the target; None without a target, or if no trial reached it."""
    left_out: tuple[int, ...] = ()
    """Seeds that are left out, because only some of the compared rates are complete with them."""

    @property
    def lowest(self) -> RatePoint | None:
        """Complete point with the lowest loss, or None if no point is complete."""
        complete = [point for point in self.points if point.outcome == "complete"]
        return min(complete, key=lambda point: point.loss) if complete else None

    @property
    def diverged_from(self) -> float:
        """Lowest rate above the best one at which a trial diverged, or infinity if none did."""
        best = self.lowest.rate if self.lowest else 0.0
        return min(
            (point.rate for point in self.points if point.outcome == "diverged" and point.rate > best), default=inf
        )

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds over which the rates are compared. Every complete point has all of them."""
        return tuple(sorted({seed for point in self.points for seed in point.losses}))

    def rates_by_seed(self) -> tuple[float, ...]:
        """Return the best rate of each seed, if the tried rates bracket it."""
        optima = (optimum_of(self.batch, with_seeds(self.points, (seed,))) for seed in self.seeds)
        return tuple(optimum.rate for optimum in optima if optimum and optimum.interior)


def groups_of(spec: StudySpec) -> tuple[Group, ...]:
    """Return the groups of a study."""
    return tuple(Group(optimizer, warmup) for optimizer in spec.optimizers for warmup in spec.warmup_axis)


def tunings_of(spec: StudySpec, group: Group) -> tuple[tuple[RuleName, ...], ...]:
    """Return the rules of a group, in tuples of rules that share a curve. The first tuple is the one that shows the free optimum."""
    rules = [rule for optimizer, rule in spec.pairs() if optimizer == group.optimizer]
    alone = tuple(rule for rule in rules if RULES[rule].changes_rate_alone(group.warmup))
    others = [(rule,) for rule in rules if rule not in alone]
    return (alone, *others) if alone else tuple(others)


def tune(
    spec: StudySpec, records: Iterable[TrialRecord], group: Group, rules: Sequence[RuleName]
) -> tuple[AtBatch, ...]:
    """Return the learning rates of a group under some rules, by batch. All rules are equal at the base batch, so trials there use one."""
    base = spec.batches[0]
    mine = [
        record
        for record in records
        if (record.trial.optimizer, record.trial.warmup) == (group.optimizer, group.warmup)
        and (record.trial.rule in rules or record.trial.batch == base)
    ]
    batches = sorted({*spec.batches, *(record.trial.batch for record in mine)})
    return tuple(
        at_batch(batch, rate_points([own for own in mine if own.trial.batch == batch], base), spec.target)
        for batch in batches
    )


def rate_points(records: Iterable[TrialRecord], base: int) -> tuple[RatePoint, ...]:
    """Return the points of one batch in ascending order of their rates; `base` is the base batch."""
    by_rate: dict[str, list[TrialRecord]] = {}
    for record in records:
        trial = record.trial
        is_fixed = trial.batch == base or RULES[trial.rule].changes_rate_alone(trial.warmup)
        by_rate.setdefault(f"{_requested_rate(record, base) if is_fixed else trial.base_lr:.5g}", []).append(record)
    return tuple(sorted((_point(tuple(records), base) for records in by_rate.values()), key=lambda point: point.rate))


def at_batch(batch: int, points: tuple[RatePoint, ...], target: float | None) -> AtBatch:
    """Return the optimum of a batch and its problem, computed from its points over the seeds that they have in common."""
    complete = [point.losses for point in points if point.outcome == "complete"]
    seeds = common_seeds(complete)
    fewest = _fewest(points, target) if target is not None else None
    points = over_seeds(points, seeds)
    optimum = optimum_of(batch, points)
    left_out = tuple(sorted({seed for losses in complete for seed in losses} - set(seeds)))
    return AtBatch(batch, points, optimum, _problem(batch, points, optimum), fewest, left_out)


def over_seeds(points: Sequence[RatePoint], seeds: Collection[int]) -> tuple[RatePoint, ...]:
    """Return the points with the losses of the given seeds only. A complete point that lacks one of these seeds has no loss."""
    return tuple(_over_seeds(point, seeds) for point in points)


def _over_seeds(point: RatePoint, seeds: Collection[int]) -> RatePoint:
    if point.outcome != "complete":
        return replace(point, losses={})
    if any(seed not in point.losses for seed in seeds):
        return replace(point, losses={}, outcome=_outcome_without_loss(point.records))
    kept = tuple(record for record in point.records if record.trial.seed in seeds)
    return replace(point, losses={seed: point.losses[seed] for seed in seeds}, records=kept)


def over_common_seeds(batches: Sequence[AtBatch]) -> list[AtBatch]:
    """Return the points over the seeds that all of `batches` have in common, so that losses of one can be compared with those of others."""
    seeds = common_seeds(tuned.seeds for tuned in batches)
    return [
        tuned if tuned.seeds == seeds else replace(tuned, points=over_seeds(tuned.points, seeds)) for tuned in batches
    ]


def optimum_of(batch: float, points: Sequence[RatePoint]) -> Optimum | None:
    """Return the best rate of a batch.

    It is None if no trial is complete, or if none has learned, because the lowest loss is then due to chance. A neighbour that was stopped
    or learned nothing brackets the best rate, but its loss is not a point of the parabola.
    """
    tried = [point for point in points if point.outcome in ENDED]
    if not any(point.has_learned for point in tried):
        return None
    lost = [point.outcome == "stopped" or (point.outcome == "complete" and not point.has_learned) for point in tried]
    return best_rate(batch, [point.rate for point in tried], [point.loss for point in tried], lost)


@dataclass(frozen=True)
class LossAt:
    """Loss at a learning rate, if it is known."""

    loss: float | None = None
    """Loss; None if it is not known."""
    outcome: Outcome | None = None
    """Outcome of the trials at the rate; None if there are none."""
    is_between: bool = False
    """Whether the loss is interpolated between two tried rates. Then it is too high in a convex valley and too low next to divergence."""


def loss_at(points: Sequence[RatePoint], rate: float) -> LossAt:
    """Return the loss of a learning rate, either measured or interpolated linearly in log rate between the two nearest tried rates.

    The loss is not known beyond the tried rates, or next to a rate that is not complete.
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


def with_seeds(points: Sequence[RatePoint], seeds: Sequence[int]) -> list[RatePoint]:
    """Return the points of an AtBatch with the losses of the given seeds only, which may repeat."""
    return [
        replace(point, losses=dict(enumerate(point.losses[seed] for seed in seeds)))
        if point.outcome == "complete"
        else point
        for point in points
    ]


def _requested_rate(record: TrialRecord, base: int) -> float:
    """Return the learning rate at the top of the schedule, scaled by the rule unless that is measured."""
    trial = record.trial
    rule = RULES[trial.rule]
    return trial.base_lr * (1.0 if rule.is_measured else rule.factor(trial.batch / base))


def _point(records: tuple[TrialRecord, ...], base: int) -> RatePoint:
    """Return the point of trials that differ only in their seed."""
    known = [record.lr for record in records if isfinite(record.lr) and record.lr > 0]
    measures = any(RULES[record.trial.rule].is_measured for record in records)
    rate = sum(known) / len(known) if measures and known else _requested_rate(records[0], base)
    losses = {
        record.trial.seed: record.loss for record in records if record.state == "complete" and isfinite(record.loss)
    }
    return RatePoint(rate, records[0].trial.base_lr, _outcome(records, bool(losses)), losses, records)


def _outcome(records: Sequence[TrialRecord], has_losses: bool) -> Outcome:
    """Return the outcome of a point. One diverged seed makes a rate unstable, and one stopped seed makes the mean of the others too low."""
    states = {record.state for record in records}
    unusable = any(record.state == "complete" and not isfinite(record.loss) for record in records)
    if "diverged" in states or unusable:
        return "diverged"
    if "stopped" in states:
        return "stopped"
    return "complete" if has_losses else _outcome_without_loss(records)


def _outcome_without_loss(records: Sequence[TrialRecord]) -> Outcome:
    """Return the outcome of a point of which no trial, or none with the compared seeds, is complete."""
    states = {record.state for record in records}
    return "failed" if "failed" in states and not states & {"waiting", "running"} else "unfinished"


def _fewest(points: Sequence[RatePoint], target: float) -> Fewest | None:
    """Return the rate with the fewest steps to the target, or None if no rate reached it after the first measurement.

    Rates are compared over the seeds with which all of them ended, and all of these seeds must reach the target.
    """
    tried = [point for point in points if point.outcome in ENDED]
    rates, diverged = [point.rate for point in tried], [point.outcome == "diverged" for point in tried]
    ended = [
        {record.trial.seed: record for record in point.records if record.state in ("complete", "stopped")}
        for point in tried
    ]
    seeds = common_seeds(by_seed for by_seed, is_diverged in zip(ended, diverged, strict=True) if not is_diverged)
    best: Fewest | None = None
    for at, (point, by_seed) in enumerate(zip(tried, ended, strict=True)):
        if point.outcome == "diverged" or not seeds or any(seed not in by_seed for seed in seeds):
            continue
        steps = tuple(by_seed[seed].steps_to(target) for seed in seeds)
        if not all(0 < count < inf for count in steps):
            continue
        _about, edge = about_lowest(rates, at, diverged)
        least = Fewest(point.rate, steps, tuple(by_seed[seed].samples_to(target) for seed in seeds), seeds, edge)
        best = least if best is None or least.mean_steps < best.mean_steps else best
    return best


def is_open(fewest: Fewest) -> bool:
    """Return whether an untried rate may take clearly fewer steps. Next to a rate that diverged, little can be gained."""
    return fewest.edge not in (None, "diverged")


def _problem(batch: int, points: Sequence[RatePoint], optimum: Optimum | None) -> str:
    """Return the reason why a batch has no optimum, or why its optimum is only a bound; empty otherwise."""
    outcomes = {point.outcome for point in points}
    if optimum is None:
        if outcomes == {"diverged"}:
            return f"every learning rate diverged at batch {batch:,}; add lower ones"
        if "complete" in outcomes:
            firsts = [point.first_loss for point in points if isfinite(point.first_loss)]
            several = any(len(point.losses) > 1 for point in points)
            who, mean = ("learning rate", ", the mean over seeds") if several else ("trial", "")
            return (
                f"no {who} at batch {batch:,} ended below its first loss ({sum(firsts) / len(firsts):.4g}{mean}); "
                "add other learning rates, or more samples"
            )
        return f"no trial at batch {batch:,} is complete" if points else f"no trial has batch {batch:,}"
    best = f"the best learning rate ({optimum.rate:.4g})"
    match optimum.edge:
        case None:
            return ""
        case "diverged":
            return f"at batch {batch:,} {best} is next to one that diverged; add learning rates between the two"
        case "alone":
            others = f"the other learning rates do not bracket the best one ({optimum.rate:.4g})"
            return f"at batch {batch:,} {others}; add lower and higher ones"
        case "highest":
            return f"at batch {batch:,} {best} is the highest one that was tried; add higher ones"
        case "lowest":
            return f"at batch {batch:,} {best} is the lowest one that was tried; add lower ones"
        case _:
            assert_never(optimum.edge)
