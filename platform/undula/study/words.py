"""What a study found, in words: the verdict on each group, and what was not tested. Pure."""

from collections import Counter
from math import isfinite

from undula.plan.rules import RULES
from undula.report.summary import counted, number
from undula.study.findings import Findings, GroupFindings, Tuning, Verdict
from undula.study.fits import RULE_EXPONENTS, Interval, ParetoFit
from undula.study.spec import CLASSES, StudySpec


def sentences(found: GroupFindings) -> tuple[str, ...]:
    """The verdict on a group, in words."""
    told = _law_sentences(found.main)
    for tuning in found.others:
        rule = tuning.rules[0]
        if RULES[rule].is_measured:
            told.append(f"{rule}: not tested by an exponent, as its factor is measured; its losses are compared below.")
        else:
            told += [f"Under {rule}: {each[0].lower()}{each[1:]}" for each in _law_sentences(tuning)]
    told += _divergence_sentences(found)
    told.append(_pareto_sentence(found))
    if found.noise:
        scales = [scale for _, scale in found.noise]
        low, high = rounded(min(scales)), rounded(max(scales))
        spread = f"{low} samples" if low == high else f"{low} to {high} samples, by batch"
        told.append(f"The gradient noise scale in the second half of the best trainings is {spread}.")
    return tuple(told)


def _divergence_sentences(found: GroupFindings) -> list[str]:
    """Of rules whose own line runs into divergence, which a fit to the optima inside their range does not see."""
    told = []
    for rule in dict.fromkeys(each.rule for each in found.predictions):
        own = next((tuning for tuning in found.tunings if rule in tuning.rules), found.main)
        limits = {each.batch: each.diverged_from for each in own.batches}
        over = [
            each.batch
            for each in found.predictions
            if each.rule == rule and each.rate and each.bound in (None, "≥") and each.rate >= limits[each.batch]
        ]
        if over:
            where = f"{min(over):,}" if len(over) == 1 else f"{min(over):,}–{max(over):,}"
            told.append(
                f"{rule} asks for learning rates at batch {where} at which trainings diverged, or for higher ones."
            )
    return told


def _law_sentences(tuning: Tuning) -> list[str]:
    if not tuning.laws:
        if all(RULES[rule].is_measured for rule in tuning.rules):
            return [f"{', '.join(tuning.rules)}: not tested by an exponent, as the factor is measured."]
        return [f"No rule is tested: {tuning.problem}."]
    told = []
    for place, law in enumerate(tuning.laws):
        interval, alone = law.fit.interval, " alone" if place else ""
        grows = f"Over batches {law.batches}{alone} the best learning rate goes as batch^{law.fit.exponent:.2f}"
        if not isfinite(interval.high - interval.low):
            told.append(f"{grows}, from two batches, which leave nothing to judge by: no rule is tested.")
            continue
        if law.verdicts and not law.tells_apart:
            told.append(
                f"{grows} (95 % interval {span(interval)}), which holds linear (1), sqrt (0.5) and none (0): the data do not tell rules "
                "apart."
            )
            continue
        parts = [
            f"{judgement}: {', '.join(_claim(each) for each in law.verdicts if each.judgement == judgement)}"
            for judgement in ("rejected", "not rejected")
            if law.rules(judgement)
        ]
        told.append(f"{grows} (95 % interval {span(interval)}): {'; '.join(parts)}." if parts else f"{grows}.")
    return told


def _claim(verdict: Verdict) -> str:
    return f"{verdict.rule} ({verdict.exponent:g})"


def span(interval: Interval, digits: int = 2) -> str:
    """An exponent's interval, or with `digits` 0 a batch's, in words."""
    if not (isfinite(interval.low) or isfinite(interval.high)):
        return "no interval"
    low, high = (f"{end:.{digits}f}" if digits else rounded(end) for end in (interval.low, interval.high))
    return f"{low} to {high if isfinite(interval.high) else 'no bound'}"


def rounded(value: float) -> str:
    """A size to three digits, which is more than a fit knows: 762, 17,600."""
    return number(float(f"{value:.3g}"), 3)


def is_bounded(fit: ParetoFit) -> bool:
    """Whether the batches bound the critical batch on both sides, so that its value means something."""
    return fit.interval.low > 0 and isfinite(fit.interval.high)


def critical_words(fit: ParetoFit) -> str:
    """The critical batch in samples; a bound where the batches leave it open on one side."""
    low, high = fit.interval.low, fit.interval.high
    if not isfinite(high):
        return f"> {rounded(low)}"
    return f"< {rounded(high)}" if low <= 0 else rounded(fit.critical_batch)


def _pareto_sentence(found: GroupFindings) -> str:
    fit = found.pareto
    if fit is None:
        return f"No critical batch: {found.pareto_problem}."
    if not is_bounded(fit):
        words = critical_words(fit)
        side = "above" if words.startswith(">") else "below"
        end = "larger" if side == "above" else "smaller"
        return f"The critical batch is {side} {words[2:]} samples (95 %): batches bound it on one side alone, and {end} ones are needed."
    where = (
        "inside the batches that got to the target"
        if fit.inside
        else "partly beyond the batches that got to the target"
    )
    return (
        f"The critical batch is {rounded(fit.critical_batch)} samples (95 % interval {span(fit.interval, 0)}), {where}. There a "
        f"training takes twice the fewest steps ({rounded(fit.fewest_steps)}) and twice the fewest samples "
        f"({rounded(fit.fewest_samples)})."
    )


def rung_within_warmup(spec: StudySpec) -> str:
    """A sentence without its full stop where ASHA stops trainings that have not had their learning rate; else empty."""
    kappas = [batch / spec.batches[0] for batch in spec.batches]
    known = [rule for rule in spec.rules if not RULES[rule].is_measured]
    factor = max((RULES[rule].scaled(kappa, None).warmup for rule in known for kappa in kappas), default=1.0)
    longest = round(max(factor, 1.0) * max(spec.warmup_axis))
    if spec.rung is None or spec.rung > longest:
        return ""
    return (
        f"Learning rates whose trainings ASHA stops within their warmup: it first compares at {spec.rung:,} samples, and warmups take up "
        f"to {longest:,}; a larger first_rung compares them later"
    )


def not_tested(findings: Findings) -> tuple[str, ...]:
    """What the study says nothing about, in sentences."""
    spec, records, groups = findings.spec, findings.records, findings.groups
    low, high = min(spec.batches), max(spec.batches)
    outside = f"outside {low:,}–{high:,}" if low < high else f"other than {low:,}"
    told = [f"Batches {outside}, other models, data and lengths of training than those of {spec.job}."]
    bounds = dict.fromkeys(
        f"{found.group.title}{'' if not place else ', ' + tuning.rules[0]}: {each.problem}"
        for found in groups
        for place, tuning in enumerate(found.tunings)
        for each in tuning.batches
        if each.problem
    )
    told += [f"{text}." for text in bounds]
    if others := [rule for rule in RULES if rule not in spec.rules and rule not in RULE_EXPONENTS]:
        told.append(f"The rules {', '.join(others)}: nothing was trained with them.")
    if measured := [rule for rule in spec.rules if RULES[rule].is_measured]:
        told.append(
            f"{', '.join(measured)} by an exponent: their factors are measured, and only their losses are compared."
        )
    if spec.optimizers == ("own",):
        told.append("Optimizers other than the job's own.")
    elif absent := [name for name in CLASSES if name not in spec.optimizers]:
        told.append(f"The optimizers {', '.join(absent)}.")
    if len(spec.warmup_axis) == 1:
        told.append(f"Warmups other than {spec.warmup_axis[0]:,} samples.")
    if len(spec.seeds) == 1:
        told.append("Chance between seeds: there is one, and intervals know of the scatter between batches alone.")
    if spec.target is None:
        told.append("The critical batch: there is no target.")
    states = Counter(record.state for record in records)
    told += [f"{text}."] if states["stopped"] and (text := rung_within_warmup(spec)) else []
    if left := states["waiting"] + states["running"]:
        told.append(f"{counted(left, 'trial')} that {'is' if left == 1 else 'are'} not finished.")
    if states["failed"]:
        told.append(f"{counted(states['failed'], 'trial')} that failed.")
    return tuple(told)
