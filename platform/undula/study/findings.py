"""What a study found: the best learning rate's power of the batch, the rules that it rejects, and the critical batch. Pure.

Every verdict follows from an interval of 95 %: a rule is rejected if its power lies outside, and not tested if the interval is infinite,
as that of two batches is, or if there is none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import numpy as np

from undula.plan.rules import RULES, RuleName, changes_rate_alone, warning
from undula.study.fits import RULE_EXPONENTS, Bound, Interval, ParetoFit, PowerLaw, fit_pareto
from undula.study.rates import (
    SAME,
    AtBatch,
    Group,
    LossAt,
    exponent_of,
    factor_of,
    fit_exponent,
    groups_of,
    is_open,
    loss_at,
    tune,
    tunings_of,
)
from undula.study.spec import CLASSES, StudySpec
from undula.study.trials import TrialRecord

Judgement = Literal["rejected", "not rejected", "not tested"]
INVERSE: Mapping[Bound, Bound] = {"≥": "≤", "≤": "≥", "~": "~"}
"""Of a bound, that of one over it."""
ENOUGH_TO_PART = 5
"""Optima inside their range from which on the lower and the upper half of the batches are looked at by themselves, too."""


@dataclass(frozen=True)
class Verdict:
    """What one fit says of one rule."""

    rule: RuleName
    exponent: float | None
    """That the rule claims; None for one that measures."""
    judgement: Judgement


@dataclass(frozen=True)
class Law:
    """The best learning rate's power of the batch over a range of batches, and what follows for rules."""

    fit: PowerLaw
    verdicts: tuple[Verdict, ...]

    @property
    def low(self) -> float:
        """The smallest batch that it was fitted to."""
        return min(each.batch for each in self.fit.used)

    @property
    def high(self) -> float:
        return max(each.batch for each in self.fit.used)

    @property
    def batches(self) -> str:
        return f"{self.low:,.0f}–{self.high:,.0f}"

    @property
    def tells_apart(self) -> bool:
        """Whether the interval leaves out a power that a common rule claims; one that holds them all says nothing in favour of any."""
        return not all(self.fit.interval.holds(power) for power in RULE_EXPONENTS.values())

    def rules(self, judgement: Judgement) -> list[RuleName]:
        return [each.rule for each in self.verdicts if each.judgement == judgement]


@dataclass(frozen=True)
class Tuning:
    """The learning rates under rules whose trainings are points of one curve, and what is fitted to the best ones."""

    rules: tuple[RuleName, ...]
    batches: tuple[AtBatch, ...]
    laws: tuple[Law, ...]
    """Over all batches, then over the lower and the upper half of them where there are enough; empty where none can be fitted."""
    problem: str
    """Why there is no law: a sentence, else empty."""


@dataclass(frozen=True)
class Prediction:
    """What a rule makes of the learning rate that was tuned at the base batch, at another."""

    rule: RuleName
    batch: int
    rate: float | None
    """From the base batch's optimum; None where there is none, or the rule measures and was not trained."""
    bound: Bound | None
    """Where the base batch's optimum is a bound, that of the rate."""
    tuned: float | None
    """The optimum at this batch."""
    tuned_bound: Bound | None
    at_rate: LossAt
    """The loss there under the rule, mean over seeds; nothing where the rate is a bound. Of a rule that measures, that of the training
    with the base batch's best rate that was tried."""
    tuned_loss: float | None
    """The lowest at this batch that was measured; the best rate's is lower where that is a bound."""

    @property
    def ratio(self) -> tuple[Bound | None, float] | None:
        """The rate over the tuned one, as a bound where one of them is; None where both leave it open, or there is none."""
        if self.rate is None or not self.tuned:
            return None
        of_tuned = self.tuned_bound and INVERSE[self.tuned_bound]
        if self.bound and of_tuned and self.bound != of_tuned:
            return None
        return self.bound or of_tuned, self.rate / self.tuned

    @property
    def loss_bound(self) -> Bound | None:
        """What the loss is to the one that is told."""
        return "~" if self.at_rate.is_between else None

    @property
    def tuned_loss_bound(self) -> Bound | None:
        return "≤" if self.tuned_bound else None

    @property
    def cost(self) -> tuple[Bound | None, float] | None:
        """The loss over the lowest; None where one of them is not known."""
        if self.at_rate.loss is None or self.tuned_loss is None:
            return None
        return self.loss_bound or (self.tuned_loss_bound and "≥"), self.at_rate.loss - self.tuned_loss


@dataclass(frozen=True)
class GroupFindings:
    """What was found of one optimizer with one warmup."""

    group: Group
    main: Tuning
    """The learning rate tuned at each batch, with nothing else changed where there are such trainings."""
    others: tuple[Tuning, ...]
    """Under rules that change more than the learning rate."""
    pareto: ParetoFit | None
    pareto_problem: str
    """Why there is no critical batch: a sentence, else empty."""
    predictions: tuple[Prediction, ...]
    noise: tuple[tuple[int, float], ...]
    """By batch, the median noise scale in samples over the second half of its best training; where it was measured."""

    @property
    def tunings(self) -> tuple[Tuning, ...]:
        return (self.main, *self.others)


@dataclass(frozen=True)
class Findings:
    """Of a whole study."""

    spec: StudySpec
    records: tuple[TrialRecord, ...]
    groups: tuple[GroupFindings, ...]
    warnings: tuple[str, ...]
    """Of rules that are not known to hold for an optimizer of the study."""

    @property
    def unfinished(self) -> int:
        """Trials that wait or run."""
        return sum(not record.has_ended for record in self.records)


def find(spec: StudySpec, records: Sequence[TrialRecord]) -> Findings:
    """All that the records say. Nothing in them is refused: what cannot be fitted is a sentence in its place."""
    groups = tuple(_group(spec, records, group) for group in groups_of(spec))
    told = {
        text: None
        for optimizer, rule in spec.pairs()
        if optimizer in CLASSES and len(spec.batches) > 1 and (text := warning(rule, (CLASSES[optimizer],)))
    }
    warnings = tuple(text.removeprefix("schedule.batch_rule=") for text in told)
    return Findings(spec, tuple(records), groups, warnings)


def judge(exponent: float | None, interval: Interval | None) -> Judgement:
    """Rejected if and only if the exponent lies outside a finite interval."""
    if exponent is None or interval is None or not (isfinite(interval.low) and isfinite(interval.high)):
        return "not tested"
    return "not rejected" if interval.holds(exponent) else "rejected"


def law_of(fit: PowerLaw, exponents: dict[RuleName, float]) -> Law:
    """A fit, and what follows from its interval for rules with those powers of the batch."""
    return Law(fit, tuple(Verdict(rule, power, judge(power, fit.interval)) for rule, power in exponents.items()))


def _group(spec: StudySpec, records: Sequence[TrialRecord], group: Group) -> GroupFindings:
    tunings = [
        _tuning(spec, group, rules, tune(spec, records, group, rules), is_main=not place)
        for place, rules in enumerate(tunings_of(spec, group))
    ]
    if not tunings:  # a spec refuses an optimizer without a rule
        tunings = [Tuning(("none",), (), (), "no rule goes with this optimizer")]
    main = tunings[0]
    pareto, problem = _pareto(spec, main.batches)
    noise = tuple((each.batch, scale) for each in main.batches if (scale := late_noise(each)) is not None)
    return GroupFindings(group, main, tuple(tunings[1:]), pareto, problem, _predictions(spec, group, tunings), noise)


def _tuning(
    spec: StudySpec, group: Group, rules: tuple[RuleName, ...], batches: tuple[AtBatch, ...], is_main: bool
) -> Tuning:
    exponents: dict[RuleName, float] = {}
    if is_main and changes_rate_alone(rules[0], group.warmup):
        exponents = {rule: RULE_EXPONENTS[rule] for rule in ("linear", "sqrt", "none")}
    exponents |= {rule: power for rule in rules if (power := exponent_of(rule)) is not None}
    if len(spec.batches) == 1:
        return Tuning(
            rules, batches, (), f"the study has one batch ({spec.batches[0]:,}): a power law takes two or more"
        )
    inside = [each for each in batches if each.optimum and each.optimum.interior]
    try:
        laws = [law_of(fit_exponent(batches), exponents)]
    except ValueError as error:
        return Tuning(rules, batches, (), str(error))
    if len(inside) >= ENOUGH_TO_PART:
        middle = len(inside) // 2
        laws += [law_of(fit_exponent(part), exponents) for part in (inside[: middle + 1], inside[middle:])]
    return Tuning(rules, batches, tuple(laws), "")


def _pareto(spec: StudySpec, batches: Sequence[AtBatch]) -> tuple[ParetoFit | None, str]:
    """Fitted to the mean over seeds, of log steps, at the rate with the fewest; a rate at the end of the range is a bound and stays out.

    One point a batch: no batch lies quite on the hyperbola, and more seeds of the same would make the interval narrow about a value
    that is off.

    One beside a rate that diverged stays in: it is off by no more than the step between the two.
    """
    if spec.target is None:
        return None, "the study has no target, so that there are no steps to count: give target"
    if len(spec.batches) == 1:
        return None, f"the study has one batch ({spec.batches[0]:,}), and steps are compared between three or more"
    reached = [(each.batch, each.fewest) for each in batches if each.fewest]
    used = [(batch, fewest) for batch, fewest in reached if not is_open(fewest)]
    records = [record for each in batches for point in each.points for record in point.records]
    if not reached and any(record.samples_to(spec.target) == 0 for record in records):
        return None, f"trainings are at the target of {spec.target:g} before their first step: lower target"
    if not any(isfinite(record.loss) for record in records):
        return None, "every training diverged" if _all_diverged(records) else "no training is complete"
    if not reached:
        return None, f"no training got to the target of {spec.target:g}: train for more samples, or raise target"
    steps = [float(np.exp(np.mean(np.log(fewest.steps)))) for _, fewest in used]
    try:
        fit = fit_pareto([batch for batch, _ in used], steps)
        if fit.interval.low <= 0 and not isfinite(fit.interval.high):
            return (
                None,
                "the steps to the target do not bound it on either side: more batches are needed, or more seeds",
            )
        return fit, ""
    except ValueError as error:
        at_end = [f"{batch:,}" for batch, fewest in reached if (batch, fewest) not in used]
        if not at_end:
            return None, str(error)
        return None, (
            f"{error}; at {', '.join(at_end)} the fewest steps are those of a learning rate that no others bracket, which bound the "
            f"best: more learning rates are needed"
        )


def _all_diverged(records: Sequence[TrialRecord]) -> bool:
    return bool(records) and all(record.state == "diverged" for record in records)


def late_noise(at: AtBatch) -> float | None:
    """The median noise scale over the second half of the batch's best training; None where none was measured."""
    record = best_record(at)
    late = [scale for samples, scale in record.noise if 2 * samples >= record.samples] if record else []
    finite = [scale for scale in late if isfinite(scale) and scale > 0]
    return float(np.median(finite)) if finite else None


def best_record(at: AtBatch) -> TrialRecord | None:
    """A complete training with the lowest mean loss of its batch, of the first seed that measured the noise scale."""
    complete = [record for record in at.lowest.records if record.state == "complete"] if at.lowest else []
    return next((record for record in complete if record.noise), complete[0] if complete else None)


def _predictions(spec: StudySpec, group: Group, tunings: Sequence[Tuning]) -> tuple[Prediction, ...]:
    base, main = spec.batches[0], {each.batch: each for each in tunings[0].batches}
    at_base = main.get(base)
    plain = changes_rate_alone(tunings[0].rules[0], group.warmup)
    asked = dict.fromkeys((*(("linear", "sqrt", "none") if plain else ()), *(r for t in tunings for r in t.rules)))
    found = []
    for rule in asked:
        own = next((tuning for tuning in tunings if rule in tuning.rules), tunings[0])
        for each in own.batches:
            if each.batch != base and at_base:
                found.append(_predict(rule, at_base, each, main.get(each.batch)))
    return tuple(found)


def _predict(rule: RuleName, at_base: AtBatch, own: AtBatch, tuned: AtBatch | None) -> Prediction:
    """`own` has the rule's trainings at the batch, `tuned` those that show the best."""
    base, best = at_base.optimum, tuned.lowest if tuned else None
    if RULES[rule].is_measured:
        rate, at_rate = _measured(at_base, own)
    else:
        rate = base.rate * factor_of(rule, own.batch / at_base.batch) if base else None
        at_rate = loss_at(own.points, rate) if base and rate and base.interior else LossAt()
    optimum = tuned.optimum if tuned else None
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
    """Rate and loss of a rule that measures: of its training with the base batch's best rate that was tried."""
    best, base = at_base.lowest, at_base.optimum
    same = (point for point in own.points if best and abs(point.base_rate / best.base_rate - 1) < SAME)
    if (trained := next(same, None)) is None or best is None:
        return None, LossAt()
    rate = base.rate * trained.rate / best.rate if base else None
    return rate, LossAt(trained.loss if trained.outcome == "complete" else None, trained.outcome)
