"""Findings of a study: the power law of the best learning rate, the rules that it rejects, and the critical batch. Pure.

Every verdict follows from a 95 % interval. A rule is rejected if its exponent lies outside the interval. It is not tested if there is no
interval, or if the interval is infinite, as with two batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import numpy as np

from undula.plan.rules import RULES, RuleName, powers, warning
from undula.study.exponents import fit_exponent
from undula.study.fits import Bound, Interval, ParetoFit, PowerLaw, fit_pareto
from undula.study.rates import (
    SAME,
    AtBatch,
    Group,
    LossAt,
    groups_of,
    is_open,
    loss_at,
    over_common_seeds,
    tune,
    tunings_of,
)
from undula.study.seeds import common_seeds
from undula.study.spec import CLASSES, StudySpec
from undula.study.trials import TrialRecord

Judgement = Literal["rejected", "not rejected", "not tested"]
INVERSE: Mapping[Bound, Bound] = {"≥": "≤", "≤": "≥", "~": "~"}
"""Bound of the reciprocal of a value, by the bound of the value."""
ENOUGH_TO_PART = 5
"""Minimum number of bracketed optima for which the lower and the upper half of the batches are also fitted separately."""


@dataclass(frozen=True)
class Verdict:
    """Judgement of one fit on one rule."""

    rule: RuleName
    exponent: float | None
    """Exponent of the rule; None for a measured rule."""
    judgement: Judgement


@dataclass(frozen=True)
class Law:
    """Power law of the best learning rate over a range of batches, and its verdicts on rules."""

    fit: PowerLaw
    verdicts: tuple[Verdict, ...]

    @property
    def low(self) -> float:
        """Smallest batch of the fit."""
        return min(tuned.batch for tuned in self.fit.used)

    @property
    def high(self) -> float:
        """Largest batch of the fit."""
        return max(tuned.batch for tuned in self.fit.used)

    @property
    def batches(self) -> str:
        return f"{self.low:,.0f}–{self.high:,.0f}"

    @property
    def tells_apart(self) -> bool:
        """Whether the interval excludes the exponent of at least one of `powers()`. Otherwise it favours no rule."""
        return not all(self.fit.interval.holds(power) for power in powers().values())

    def rules(self, judgement: Judgement) -> list[RuleName]:
        return [verdict.rule for verdict in self.verdicts if verdict.judgement == judgement]


@dataclass(frozen=True)
class Tuning:
    """Learning rates under rules that share a curve, and the power laws fitted to the best rates."""

    rules: tuple[RuleName, ...]
    batches: tuple[AtBatch, ...]
    laws: tuple[Law, ...]
    """Law over all batches and, with enough batches, the laws over the lower and the upper half. Empty if none can be fitted."""
    problem: str
    """Reason why there is no law; empty otherwise."""


@dataclass(frozen=True)
class Prediction:
    """Learning rate that a rule predicts for a batch from the tuned rate of the base batch."""

    rule: RuleName
    batch: int
    rate: float | None
    """Predicted rate; None if the base batch has no optimum, or if the rule is measured and was not tried."""
    bound: Bound | None
    """Bound of the predicted rate, if the optimum of the base batch is only a bound."""
    tuned: float | None
    """Best rate at this batch."""
    tuned_bound: Bound | None
    """Bound of the best rate, if it is only a bound."""
    at_rate: LossAt
    """Mean loss over seeds at the predicted rate under the rule; not known if the rate is a bound. For a measured rule, it is the loss of
    the trial with the best tried rate of the base batch."""
    tuned_loss: float | None
    """Lowest measured loss at this batch. If the best rate is only a bound, its loss is lower."""

    @property
    def ratio(self) -> tuple[Bound | None, float] | None:
        """Ratio of the predicted rate to the best one, after its bound; None if the bounds of both do not bound the ratio."""
        if self.rate is None or not self.tuned:
            return None
        of_tuned = self.tuned_bound and INVERSE[self.tuned_bound]
        if self.bound and of_tuned and self.bound != of_tuned:
            return None
        return self.bound or of_tuned, self.rate / self.tuned

    @property
    def loss_bound(self) -> Bound | None:
        """Bound of the loss at the predicted rate."""
        return "~" if self.at_rate.is_between else None

    @property
    def tuned_loss_bound(self) -> Bound | None:
        """Bound of the lowest loss."""
        return "≤" if self.tuned_bound else None

    @property
    def cost(self) -> tuple[Bound | None, float] | None:
        """Loss at the predicted rate minus the lowest loss, after its bound; None if one of them is not known."""
        if self.at_rate.loss is None or self.tuned_loss is None:
            return None
        return self.loss_bound or (self.tuned_loss_bound and "≥"), self.at_rate.loss - self.tuned_loss


@dataclass(frozen=True)
class GroupFindings:
    """Findings on one optimizer with one warmup."""

    group: Group
    main: Tuning
    """Learning rate tuned at each batch. If the study has such trials, only the rate changes with the batch."""
    others: tuple[Tuning, ...]
    """Learning rates under rules that change more than the rate."""
    pareto: ParetoFit | None
    pareto_problem: str
    """Reason why there is no critical batch; empty otherwise."""
    predictions: tuple[Prediction, ...]
    noise: tuple[tuple[int, float], ...]
    """Pairs (batch, gradient noise scale in samples). The scale is the median over the second half of the batch's best trial."""

    @property
    def tunings(self) -> tuple[Tuning, ...]:
        return (self.main, *self.others)


@dataclass(frozen=True)
class Findings:
    """Findings of a study."""

    spec: StudySpec
    records: tuple[TrialRecord, ...]
    groups: tuple[GroupFindings, ...]
    warnings: tuple[str, ...]
    """Warnings about rules that are not known to hold for an optimizer of the study."""

    @property
    def unfinished(self) -> int:
        """Number of trials that have not ended."""
        return sum(not record.has_ended for record in self.records)


def find(spec: StudySpec, records: Sequence[TrialRecord]) -> Findings:
    """Compute the findings from a study's records. If a fit is not possible, the findings have the reason instead."""
    groups = tuple(_group(spec, records, group) for group in groups_of(spec))
    texts = {
        text: None
        for optimizer, rule in spec.pairs()
        if optimizer in CLASSES and len(spec.batches) > 1 and (text := warning(rule, (CLASSES[optimizer],)))
    }
    warnings = tuple(text.removeprefix("schedule.batch_rule=") for text in texts)
    return Findings(spec, tuple(records), groups, warnings)


def judge(exponent: float | None, interval: Interval | None) -> Judgement:
    """Return the judgement on an exponent. It is rejected if and only if it lies outside a finite interval."""
    if exponent is None or interval is None or not (isfinite(interval.low) and isfinite(interval.high)):
        return "not tested"
    return "not rejected" if interval.holds(exponent) else "rejected"


def law_of(fit: PowerLaw, exponents: dict[RuleName, float]) -> Law:
    """Return a fit with its verdicts on rules.

    Args:
        fit: The fit.
        exponents: Exponents of the rules.
    """
    return Law(fit, tuple(Verdict(rule, power, judge(power, fit.interval)) for rule, power in exponents.items()))


def _group(spec: StudySpec, records: Sequence[TrialRecord], group: Group) -> GroupFindings:
    """Return the findings on a group."""
    tunings = [
        _tuning(spec, group, rules, tune(spec, records, group, rules), is_main=not place)
        for place, rules in enumerate(tunings_of(spec, group))
    ]
    if not tunings:  # StudySpec refuses an optimizer without a rule
        tunings = [Tuning(("none",), (), (), "no rule can be used with this optimizer")]
    main = tunings[0]
    pareto, problem = _pareto(spec, main.batches)
    noise = tuple((tuned.batch, scale) for tuned in main.batches if (scale := late_noise(tuned)) is not None)
    return GroupFindings(group, main, tuple(tunings[1:]), pareto, problem, _predictions(spec, group, tunings), noise)


def _tuning(
    spec: StudySpec, group: Group, rules: tuple[RuleName, ...], batches: tuple[AtBatch, ...], is_main: bool
) -> Tuning:
    """Return the power laws of a group under some rules; `is_main` says whether these rules show the free optimum."""
    exponents: dict[RuleName, float] = {}
    if is_main and RULES[rules[0]].changes_rate_alone(group.warmup):
        exponents = powers()
    exponents |= {rule: power for rule in rules if (power := RULES[rule].exponent) is not None}
    if len(spec.batches) == 1:
        return Tuning(
            rules, batches, (), f"the study has one batch ({spec.batches[0]:,}), but a power law needs two or more"
        )
    inside = [tuned for tuned in batches if tuned.optimum and tuned.optimum.interior]
    try:
        laws = [law_of(fit_exponent(batches), exponents)]
    except ValueError as error:
        return Tuning(rules, batches, (), str(error))
    if len(inside) >= ENOUGH_TO_PART:
        middle = len(inside) // 2
        laws += [law_of(fit_exponent(part), exponents) for part in (inside[: middle + 1], inside[middle:])]
    return Tuning(rules, batches, tuple(laws), "")


def _pareto(spec: StudySpec, batches: Sequence[AtBatch]) -> tuple[ParetoFit | None, str]:
    """Return the hyperbola of steps and samples, or the reason why there is none.

    It is fitted to one point for each batch, which is the mean of the log steps at the rate with the fewest steps, over the seeds that the
    batches have in common. Seeds are not
    points of their own: no batch lies exactly on the hyperbola, so more seeds of one batch would narrow the interval about a wrong value.
    A rate at the end of its range is a bound and is left out. A rate next to one that diverged is used, because the best rate is at most
    one step of the grid away.
    """
    if spec.target is None:
        return None, "the study has no target, so there are no steps to count; set target"
    if len(spec.batches) == 1:
        return None, f"the study has one batch ({spec.batches[0]:,}), but a critical batch needs three or more"
    reached = [(tuned.batch, tuned.fewest) for tuned in batches if tuned.fewest]
    used = [(batch, fewest) for batch, fewest in reached if not is_open(fewest)]
    seeds = common_seeds(fewest.seeds for _, fewest in used)
    used = [(batch, fewest) for batch, fewest in used if set(seeds) <= set(fewest.seeds)]
    records = [record for tuned in batches for point in tuned.points for record in point.records]
    if not reached and any(record.samples_to(spec.target) == 0 for record in records):
        return None, f"trials are at the target of {spec.target:g} before their first step; lower target"
    if not any(isfinite(record.loss) for record in records):
        return None, "every trial diverged" if _all_diverged(records) else "no trial is complete"
    if not reached:
        return None, f"no trial reached the target of {spec.target:g}; train for more samples, or raise target"
    steps = [float(np.exp(np.mean(np.log(fewest.steps_of(seeds))))) for _, fewest in used]
    try:
        fit = fit_pareto([batch for batch, _ in used], steps)
        if fit.interval.low <= 0 and not isfinite(fit.interval.high):
            return (
                None,
                "the steps to the target do not bound it on either side; add batches or seeds",
            )
        return fit, ""
    except ValueError as error:
        at_end = [f"{batch:,}" for batch, fewest in reached if is_open(fewest)]
        if not at_end:
            return None, str(error)
        return None, (
            f"{error}; at {', '.join(at_end)}, no other learning rates bracket the one with the fewest steps, so add learning rates there"
        )


def _all_diverged(records: Sequence[TrialRecord]) -> bool:
    return bool(records) and all(record.state == "diverged" for record in records)


def late_noise(at: AtBatch) -> float | None:
    """Return the median gradient noise scale, in samples, over the second half of the batch's best trial; None if it was not measured."""
    record = best_record(at)
    late = [scale for samples, scale in record.noise if 2 * samples >= record.samples] if record else []
    finite = [scale for scale in late if isfinite(scale) and scale > 0]
    return float(np.median(finite)) if finite else None


def best_record(at: AtBatch) -> TrialRecord | None:
    """Return a complete trial of the rate with the lowest mean loss, preferably one that measured the noise scale."""
    complete = [record for record in at.lowest.records if record.state == "complete"] if at.lowest else []
    return next((record for record in complete if record.noise), complete[0] if complete else None)


def _predictions(spec: StudySpec, group: Group, tunings: Sequence[Tuning]) -> tuple[Prediction, ...]:
    """Return predictions of the rules that were tried, and of common rules that need no trial."""
    base, main = spec.batches[0], {tuned.batch: tuned for tuned in tunings[0].batches}
    at_base = main.get(base)
    plain = RULES[tunings[0].rules[0]].changes_rate_alone(group.warmup)
    rules = dict.fromkeys((*(powers() if plain else ()), *(r for t in tunings for r in t.rules)))
    predictions = []
    for rule in rules:
        own = next((tuning for tuning in tunings if rule in tuning.rules), tunings[0])
        for tuned in own.batches:
            if tuned.batch != base and at_base:
                predictions.append(_predict(rule, at_base, tuned, main.get(tuned.batch)))
    return tuple(predictions)


def _predict(rule: RuleName, at_base: AtBatch, own: AtBatch, tuned: AtBatch | None) -> Prediction:
    """Return the prediction of a rule.

    Args:
        rule: The rule.
        at_base: Learning rates at the base batch.
        own: Learning rates at the other batch, under the rule.
        tuned: Learning rates at the other batch that show the free optimum, if there are any.
    """
    base, optimum = at_base.optimum, tuned.optimum if tuned else None
    if tuned:
        own, tuned = over_common_seeds([own, tuned])
    best = tuned.lowest if tuned else None
    if RULES[rule].is_measured:
        rate, at_rate = _measured(at_base, own)
    else:
        rate = base.rate * RULES[rule].factor(own.batch / at_base.batch) if base else None
        at_rate = loss_at(own.points, rate) if base and rate and base.interior else LossAt()
    return Prediction(
        rule,
        own.batch,
        rate,
        base.bound if base else None,
        optimum.rate if optimum else None,
        optimum.bound if optimum else None,
        at_rate,
        best.loss if best else None,
    )


def _measured(at_base: AtBatch, own: AtBatch) -> tuple[float | None, LossAt]:
    """Return the rate and loss of a measured rule, from its trial with the best tried base rate of the base batch."""
    best, base = at_base.lowest, at_base.optimum
    same = (point for point in own.points if best and abs(point.base_rate / best.base_rate - 1) < SAME)
    if (trained := next(same, None)) is None or best is None:
        return None, LossAt()
    rate = base.rate * trained.rate / best.rate if base else None
    return rate, LossAt(trained.loss if trained.outcome == "complete" else None, trained.outcome)
