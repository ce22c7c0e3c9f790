"""Verdicts of a study on the scaling rules as sentences, and a list of what was not tested. Pure."""

from collections import Counter
from collections.abc import Sequence
from math import isfinite

from undula.plan.rules import RULES, powers
from undula.report.text import counted, number
from undula.study.findings import Findings, GroupFindings, Law, Tuning, Verdict
from undula.study.fits import Interval, ParetoFit
from undula.study.spec import CLASSES, StudySpec


def verdict_sentences(results: GroupFindings) -> tuple[str, ...]:
    """Return the verdicts of one group of trials, as sentences."""
    texts = _law_sentences(results.main)
    for tuning in results.others:
        rule = tuning.rules[0]
        if RULES[rule].is_measured:
            texts.append(
                f"{rule}: its exponent is not tested, because its factor is measured; its losses are compared below."
            )
        else:
            texts += [f"Under {rule}: {sentence[0].lower()}{sentence[1:]}" for sentence in _law_sentences(tuning)]
    texts += _divergence_sentences(results)
    texts.append(_critical_batch_sentence(results))
    if results.noise:
        scales = [scale for _, scale in results.noise]
        low, high = three_digits(min(scales)), three_digits(max(scales))
        size = f"{low} samples" if low == high else f"{low} to {high} samples, depending on the batch"
        texts.append(f"The gradient noise scale in the second half of the best trials is {size}.")
    return tuple(texts)


def untested_sentences(findings: Findings) -> tuple[str, ...]:
    """Return a list of what the study did not test."""
    spec, records, groups = findings.spec, findings.records, findings.groups
    low, high = min(spec.batches), max(spec.batches)
    outside = f"outside {low:,}–{high:,}" if low < high else f"other than {low:,}"
    texts = [f"Batches {outside}, and any model, data or training length other than those of {spec.job}."]
    problems = dict.fromkeys(
        f"{results.group.title}{'' if not place else ', ' + tuning.rules[0]}: {tuned.problem}"
        for results in groups
        for place, tuning in enumerate(results.tunings)
        for tuned in tuning.batches
        if tuned.problem
    )
    texts += [f"{text}." for text in problems]
    texts += _seed_sentences(findings)
    if others := [rule for rule in RULES if rule not in spec.rules and rule not in powers()]:
        texts.append(f"The rules {', '.join(others)}: no trial used them.")
    if measured := [rule for rule in spec.rules if RULES[rule].is_measured]:
        texts.append(
            f"The exponents of {', '.join(measured)}: their factors are measured, so only their losses are compared."
        )
    if spec.optimizers == ("own",):
        texts.append("Optimizers other than the job's own.")
    elif absent := [name for name in CLASSES if name not in spec.optimizers]:
        texts.append(f"The optimizers {', '.join(absent)}.")
    if len(spec.warmup_axis) == 1:
        texts.append(f"Warmups other than {spec.warmup_axis[0]:,} samples.")
    if len(spec.seeds) == 1:
        texts.append("Chance between seeds: there is one seed, so intervals reflect only the scatter between batches.")
    if spec.target is None:
        texts.append("The critical batch: the study has no target.")
    states = Counter(record.state for record in records)
    texts += [f"{text}."] if states["stopped"] and (text := early_rung_warning(spec)) else []
    if left := states["waiting"] + states["running"]:
        texts.append(f"{counted(left, 'trial')} that {'has' if left == 1 else 'have'} not finished.")
    if states["failed"]:
        texts.append(f"{counted(states['failed'], 'trial')} that failed.")
    return tuple(texts)


def _seed_sentences(findings: Findings) -> list[str]:
    """Return sentences on seeds whose results are not used, because only some of the compared learning rates have them."""
    texts: dict[str, None] = {}
    for results in findings.groups:
        for place, tuning in enumerate(results.tunings):
            title = f"{results.group.title}{'' if not place else ', ' + tuning.rules[0]}"
            for tuned in tuning.batches:
                if tuned.left_out:
                    them = "it" if len(tuned.left_out) == 1 else "them"
                    texts[
                        f"{title}: {_seeds_text(tuned.left_out)} at batch {tuned.batch:,}, because not every learning rate has finished "
                        f"with {them} there; losses are compared over {_seeds_text(tuned.seeds)} only."
                    ] = None
    return list(texts)


def _seeds_text(seeds: Sequence[int]) -> str:
    *others, last = map(str, seeds)
    return f"seeds {', '.join(others)} and {last}" if others else f"seed {last}"


def early_rung_warning(spec: StudySpec) -> str:
    """Return a warning, without a full stop, if ASHA can stop trials before their warmup ends, or an empty string otherwise."""
    kappas = [batch / spec.batches[0] for batch in spec.batches]
    known = [rule for rule in spec.rules if not RULES[rule].is_measured]
    factor = max((RULES[rule].scaled(kappa, None).warmup for rule in known for kappa in kappas), default=1.0)
    longest = round(max(factor, 1.0) * max(spec.warmup_axis))
    if spec.rung is None or spec.rung > longest:
        return ""
    return (
        f"Learning rates of trials that ASHA stops during their warmup: it first compares trials at {spec.rung:,} samples, and "
        f"warmups take up to {longest:,}; a larger first_rung compares them later"
    )


def interval_text(interval: Interval, digits: int = 2) -> str:
    """Return an interval such as `0.41 to 0.63`. With `digits` 0, its bounds are rounded to three significant digits."""
    if not (isfinite(interval.low) or isfinite(interval.high)):
        return "no interval"
    low, high = (f"{end:.{digits}f}" if digits else three_digits(end) for end in (interval.low, interval.high))
    return f"{low} to {high if isfinite(interval.high) else 'no bound'}"


def three_digits(value: float) -> str:
    """Return a number with three significant digits, such as 762 or 17,600, because a fit is not more precise."""
    return number(float(f"{value:.3g}"), 3)


def is_bounded(fit: ParetoFit) -> bool:
    """Return whether the batches bound the critical batch on both sides. Otherwise its value is meaningless."""
    return fit.interval.low > 0 and isfinite(fit.interval.high)


def critical_batch_text(fit: ParetoFit) -> str:
    """Return the critical batch in samples, or a bound if the batches bound it on one side only."""
    low, high = fit.interval.low, fit.interval.high
    if not isfinite(high):
        return f"> {three_digits(low)}"
    return f"< {three_digits(high)}" if low <= 0 else three_digits(fit.critical_batch)


def _law_sentences(tuning: Tuning) -> list[str]:
    if not tuning.laws:
        if all(RULES[rule].is_measured for rule in tuning.rules):
            return [f"{', '.join(tuning.rules)}: the exponent is not tested, because the factor is measured."]
        return [f"No rule is tested: {tuning.problem}."]
    return [_law_sentence(law, is_part=place > 0) for place, law in enumerate(tuning.laws)]


def _law_sentence(law: Law, is_part: bool) -> str:
    interval = law.fit.interval
    alone = " alone" if is_part else ""
    grows = f"Over batches {law.batches}{alone} the best learning rate scales as batch^{law.fit.exponent:.2f}"
    if not isfinite(interval.high - interval.low):
        return f"{grows}. Two batches give no interval, so no rule is tested."
    grows += f" (95 % interval {interval_text(interval)})"
    if law.verdicts and not law.tells_apart:
        *others, last = (f"{rule} ({power:g})" for rule, power in powers().items())
        return (
            f"{grows}. The interval contains {', '.join(others)} and {last}, so the data do not distinguish the rules."
        )
    parts = [
        f"{judgement}: {', '.join(_claim(verdict) for verdict in law.verdicts if verdict.judgement == judgement)}"
        for judgement in ("rejected", "not rejected")
        if law.rules(judgement)
    ]
    return f"{grows}: {'; '.join(parts)}." if parts else f"{grows}."


def _claim(verdict: Verdict) -> str:
    return f"{verdict.rule} ({verdict.exponent:g})"


def _divergence_sentences(results: GroupFindings) -> list[str]:
    """Return sentences on rules that predict rates at which trials diverge. A fit cannot show this, because all optima are stable."""
    texts = []
    for rule in dict.fromkeys(prediction.rule for prediction in results.predictions):
        own = next((tuning for tuning in results.tunings if rule in tuning.rules), results.main)
        limits = {tuned.batch: tuned.diverged_from for tuned in own.batches}
        over = [
            prediction.batch
            for prediction in results.predictions
            if prediction.rule == rule
            and prediction.rate
            and prediction.bound in (None, "≥")
            and prediction.rate >= limits[prediction.batch]
        ]
        if over:
            where = f"{min(over):,}" if len(over) == 1 else f"{min(over):,}–{max(over):,}"
            texts.append(
                f"{rule} predicts learning rates at batch {where} that are as high as rates that diverged, or higher."
            )
    return texts


def _critical_batch_sentence(results: GroupFindings) -> str:
    fit = results.pareto
    if fit is None:
        return f"No critical batch: {results.pareto_problem}."
    if not is_bounded(fit):
        bound = critical_batch_text(fit)
        side, end = ("above", "larger") if bound.startswith(">") else ("below", "smaller")
        return (
            f"The critical batch is {side} {bound[2:]} samples (95 %): the batches bound it only on one side; add {end} "
            "batches."
        )
    reached = "the batches that reached the target"
    return (
        f"The critical batch is {three_digits(fit.critical_batch)} samples (95 % interval {interval_text(fit.interval, 0)}), "
        f"{'inside' if fit.inside else 'partly beyond'} {reached}. A trial at that batch takes twice the fewest steps "
        f"({three_digits(fit.fewest_steps)}) and twice the fewest samples ({three_digits(fit.fewest_samples)})."
    )
