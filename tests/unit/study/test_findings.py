"""Tests of the findings of a study: known results are reproduced, and verdicts follow only from intervals."""

from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_records import first_group, points, quadratic_records, record, study, valley, valleys

from undula.plan.rules import RULES, RuleName, powers
from undula.study.exponents import fit_exponent
from undula.study.findings import find, judge, law_of
from undula.study.fits import Interval, Optimum, ParetoFit, PowerLaw, fit_power_law
from undula.study.rates import (
    Group,
    at_batch,
    optimum_of,
    rate_points,
    tunings_of,
)
from undula.study.spec import LogRange, StudySpec
from undula.study.trials import State, TrialRecord
from undula.study.verdicts import critical_batch_text, early_rung_warning, untested_sentences, verdict_sentences

# Known results of the noisy quadratic model are reproduced.


def test_far_below_the_noise_scale_the_best_rate_scales_with_the_batch() -> None:
    spec = study()
    law = first_group(spec, quadratic_records(spec, 40_000_000, 0.005)).main.laws[0]
    assert law.fit.exponent == pytest.approx(1.0, abs=0.08)
    assert law.rules("rejected") == ["sqrt", "none"]
    assert law.rules("not rejected") == ["linear"]
    assert law.batches == "16–256"


def test_above_the_noise_scale_the_best_rate_saturates_and_linear_is_rejected() -> None:
    spec = study(batches=(256, 512, 1024, 2048, 4096, 8192), base_lr_range=LogRange(0.1, 1.999, 40))
    whole, lower, upper = first_group(spec, quadratic_records(spec, 16_000_000, 0.002)).main.laws
    assert whole.rules("rejected") == ["linear", "none"]
    assert "linear" not in lower.rules("rejected")
    assert (upper.batches, upper.rules("rejected")) == ("2,048–8,192", ["linear", "sqrt"])


def test_the_critical_batch_of_the_quadratic_model_is_found() -> None:
    spec = study(batches=(16, 64, 256, 1024, 4096), base_lr_range=LogRange(0.03, 1.98, 16), seeds=(0,))
    found = first_group(spec, quadratic_records(spec, 50_000_000, measurements=800))
    assert found.pareto is not None
    assert found.pareto.critical_batch == pytest.approx(790, rel=0.2)
    assert found.pareto.interval.holds(790)
    assert any("The critical batch is" in text and "inside the batches" in text for text in verdict_sentences(found))


def test_halves_of_many_batches_are_judged_separately() -> None:
    spec = study(batches=(16, 64, 256, 1024, 4096), base_lrs=tuple(np.geomspace(0.01, 10, 13)), base_lr_range=None)
    best = {16: 0.1, 64: 0.4, 256: 1.6, 1024: 1.6, 4096: 1.6}  # the best rate is linear up to 256 and constant above
    whole, lower, upper = first_group(spec, valleys(best, spec.rates, (0, 1))).main.laws
    assert (whole.batches, lower.batches, upper.batches) == ("16–4,096", "16–256", "256–4,096")
    assert lower.rules("not rejected") == ["linear"]
    assert upper.rules("not rejected") == ["none"]


# Verdicts follow from intervals.

ends = st.floats(-3, 3)


@given(exponent=st.floats(-3, 3), low=ends, high=ends)
def test_a_rule_is_rejected_if_and_only_if_it_is_outside_the_interval(exponent: float, low: float, high: float) -> None:
    interval = Interval(min(low, high), max(low, high))
    outside = exponent < interval.low - 3e-9 or exponent > interval.high + 3e-9
    inside = interval.low <= exponent <= interval.high
    judgement = judge(exponent, interval)
    assert (judgement == "rejected") >= outside
    assert (judgement == "not rejected") >= inside


@given(exponent=st.floats(-3, 3), end=ends)
def test_an_infinite_interval_rejects_nothing(exponent: float, end: float) -> None:
    for interval in (Interval(-inf, inf), Interval(end, inf), Interval(-inf, end), None):
        assert judge(exponent, interval) == "not tested"
    assert judge(None, Interval(0, 1)) == "not tested"


@settings(max_examples=50)
@given(rates=st.tuples(st.floats(1e-5, 10), st.floats(1e-5, 10)))
def test_two_batches_never_reject_a_rule(rates: tuple[float, float]) -> None:
    fit = fit_power_law([Optimum(16, rates[0], 1.0, None), Optimum(64, rates[1], 1.0, None)])
    assert {each.judgement for each in law_of(fit, powers()).verdicts} == {"not tested"}


@settings(max_examples=20, deadline=None)
@given(
    bests=st.lists(st.floats(0.02, 0.9), min_size=3, max_size=5),
    shifts=st.lists(st.floats(0.7, 1.4), min_size=2, max_size=2),
)
def test_verdicts_agree_with_the_interval(bests: list[float], shifts: list[float]) -> None:
    spec = study(
        batches=tuple(16 * 4**at for at in range(len(bests))), base_lr_range=LogRange(0.01, 1.9, 9), target=None
    )
    records = []
    for batch, best in zip(spec.batches, bests, strict=True):
        for seed, shift in enumerate(shifts):
            records += valley(batch, best * shift, spec.rates, seed)
    laws = first_group(spec, records).main.laws
    assert laws
    for law in laws:
        assert law.verdicts
        for verdict in law.verdicts:
            assert verdict.exponent is not None
            if isfinite(law.fit.interval.high - law.fit.interval.low):
                assert (verdict.judgement == "rejected") == (not law.fit.interval.holds(verdict.exponent))
            else:
                assert verdict.judgement == "not tested"
        assert law.fit.interval.low <= law.fit.exponent <= law.fit.interval.high


def test_seeds_that_disagree_widen_the_interval() -> None:
    spec = study(batches=(16, 64, 256), base_lr_range=LogRange(0.01, 10, 13), target=None)

    def interval(shift: float) -> float:
        best = {batch: batch / 500 for batch in spec.batches}
        records = [*valleys({b: rate * shift for b, rate in best.items()}, spec.rates)]
        records += valleys({b: rate / shift for b, rate in best.items()}, spec.rates, (1,))
        interval = first_group(spec, records).main.laws[0].fit.interval
        return interval.high - interval.low

    assert interval(2.0) > interval(1.1) + 0.1
    # The means lie on a line. A draw of two seeds is off by -L, 0, 0 or L, so the slope is off by up to 2 L / log 16. The interval is wider
    # by sqrt(2) for two seeds, and by the ratio 3.182 / 1.960 of Student's quantile to the normal one.
    assert interval(2.0) == pytest.approx(2 * 2**0.5 * 3.182 / 1.960 * 2 * np.log(2) / np.log(16), rel=0.05)


def test_optima_without_a_parabola_widen_the_interval_by_the_spacing_of_the_grid() -> None:
    """Optima on grid points can lie on a line by chance."""
    grid = tuple(2.0**power for power in range(-10, 1))

    def batch(size: int, best: float) -> Any:
        found = [(rate, 1.0 if rate == best else 2.0, "complete" if rate == best else "stopped") for rate in grid]
        return at_batch(size, points(size, *found), None)  # type: ignore[arg-type]

    fit = fit_exponent([batch(16, 2.0**-7), batch(32, 2.0**-6), batch(64, 2.0**-5)])
    assert fit.exponent == pytest.approx(1.0)
    assert fit.interval.low == pytest.approx(0.5)
    assert fit.interval.high == pytest.approx(1.5)


def test_a_rule_that_predicts_rates_that_diverge_is_reported() -> None:
    """Optima next to divergence are bounds, which no fit uses. Linear is not rejected below them, but predicts too high rates there."""
    spec = study(batches=(64, 128, 256, 512, 4096), base_lr_range=LogRange(0.03, 2.2, 14))
    found = first_group(spec, quadratic_records(spec, 16_000_000, 0.01))
    assert found.main.laws[0].rules("not rejected") == ["linear"]
    asks = [text for text in verdict_sentences(found) if "as high as rates that diverged" in text]
    assert asks == ["linear predicts learning rates at batch 4,096 that are as high as rates that diverged, or higher."]


# The state of a trial decides what its loss shows.


@pytest.mark.parametrize("beside", [(0.2, 2.0, "stopped"), (1.0, 13.0, "complete")])
def test_a_trial_that_was_stopped_or_learned_nothing_only_brackets(beside: tuple[float, float, State]) -> None:
    lower, higher, state = beside
    optimum = optimum_of(16, points(16, (0.1, lower, state), (0.2, 0.5, "complete"), (0.4, higher, "complete")))
    assert optimum == Optimum(16, 0.2, 0.5, None, open=pytest.approx(np.log(2) / 2))


@pytest.mark.parametrize(
    ("beside", "edge"),
    [(("complete", "diverged"), "diverged"), (("stopped", "diverged"), "diverged"), (("failed", "complete"), "lowest"),
     (("complete", "waiting"), "highest"), (("complete", "failed"), "highest"), (("failed", "failed"), "alone"),
     (("failed", "diverged"), "alone"), (("diverged", "complete"), "alone"), (("diverged", "diverged"), "alone")],
)  # fmt: skip
def test_an_optimum_without_a_worse_neighbour_is_a_bound(beside: tuple[State, State], edge: str) -> None:
    found = points(16, (0.1, 2.0, beside[0]), (0.2, 1.0, "complete"), (0.4, 3.0, beside[1]))
    optimum = optimum_of(16, found)
    assert optimum
    assert (optimum.rate, optimum.edge) == (0.2, edge)


@pytest.mark.parametrize("state", ["diverged", "stopped", "complete"])
def test_one_seed_that_was_stopped_or_has_no_finite_loss_excludes_the_rate(state: State) -> None:
    (point,) = rate_points([record(16, 0.1, 0.5), record(16, 0.1, nan if state == "complete" else 0.1, state, 1)], 16)
    assert (point.outcome, point.loss) == ("diverged" if state == "complete" else state, inf)


def test_a_loss_is_the_mean_over_seeds_with_its_deviation() -> None:
    (point,) = rate_points([record(16, 0.1, 1.0, seed=0), record(16, 0.1, 2.0, seed=1)], 16)
    assert point.loss == 1.5
    assert point.deviation == pytest.approx(np.std([1, 2], ddof=1))


# Rules.


def test_rules_that_only_change_the_rate_share_a_curve() -> None:
    assert [rule for rule in RULES if RULES[rule].changes_rate_alone(0)] == ["none", "linear", "sqrt", "legw"]
    assert [rule for rule in RULES if RULES[rule].changes_rate_alone(100)] == ["none", "linear", "sqrt"]
    assert {name: rule.exponent for name, rule in RULES.items() if rule.exponent is not None} == {
        "none": 0, "linear": 1, "sqrt": 0.5, "legw": 0.5, "adam_sde": 0.5,
    }  # fmt: skip
    spec = study(rules=("none", "linear", "adam_sde", "surge"), optimizers=("adamw",))
    assert tunings_of(spec, Group("adamw", 0)) == (("none", "linear"), ("adam_sde",), ("surge",))


@pytest.mark.parametrize("rules", [("none", "adam_sde"), ("adam_sde",)])
def test_a_rule_that_changes_more_than_the_rate_is_tuned_under_it(rules: tuple[RuleName, ...]) -> None:
    spec = study(rules=rules, optimizers=("adamw",), batches=(16, 64, 256))
    tuning = first_group(spec, quadratic_records(spec, 10_000_000)).tunings[-1]
    assert tuning.rules == ("adam_sde",)
    assert [len(each.points) for each in tuning.batches] == [16, 16, 16], (
        "trials at the base batch count for every rule"
    )
    assert [each.rule for each in tuning.laws[0].verdicts] == ["adam_sde"]


def test_measured_rules_are_compared_by_loss_only() -> None:
    spec = study(rules=("none", "adascale"), batches=(16, 64, 256))
    found = first_group(spec, quadratic_records(spec, 10_000_000))
    mine = [each for each in found.predictions if each.rule == "adascale"]
    assert mine
    assert all(each.cost and each.cost[1] > 0 for each in mine)
    assert any(text.startswith("adascale: its exponent is not tested") for text in verdict_sentences(found))


def test_a_nearly_equal_rate_does_not_bracket_the_fewest_steps() -> None:
    found = points(16, (0.1, 4.5, "complete"), (0.2, 3.0, "complete"), (0.4, 0.1, "complete"), (0.401, 3.0, "complete"))
    fewest = at_batch(16, found, 4.6).fewest
    assert fewest
    assert (fewest.rate, fewest.edge) == (0.4, "highest")


def test_a_fit_has_intervals_of_its_level_and_its_slope() -> None:
    spec = study(batches=(16, 64, 256), base_lr_range=LogRange(0.001, 10, 13), target=None)
    levels = []
    for scatter in (1.05, 1.5):
        records = valleys({16: 0.05, 64: 0.05 * scatter, 256: 0.05}, spec.rates)
        levels.append(first_group(spec, records).main.laws[0].fit.level)
    # Student's quantile for one degree of freedom gives 12.7 s / sqrt(3), where s^2 is 2/3 of the square of the middle residual.
    assert levels[1] == pytest.approx(12.706 * np.log(1.5) * (2 / 3) ** 0.5 / 3**0.5, rel=0.05)
    assert levels[0] < levels[1] / 5
    near = valleys(dict.fromkeys(spec.batches, 0.0464), spec.rates)
    stopped = [each if abs(each.lr - 0.05) < 0.02 else replace(each, state="stopped") for each in near]
    assert first_group(spec, stopped).main.laws[0].fit.level > 0.3, "the level has the uncertainty of the grid"


def test_trials_that_learned_nothing_have_no_optimum() -> None:
    found = at_batch(16, points(16, (0.1, 9.1, "complete"), (0.2, 9.05, "complete"), (0.4, 9.2, "complete")), None)
    assert found.optimum is None
    assert found.problem.startswith("no trial at batch 16 ended below its first loss (9); add other learning rates")
    both = rate_points([record(16, 0.1, loss, seed=seed) for seed, loss in enumerate((8.9, 9.3))], 16)
    assert at_batch(16, both, None).problem.startswith(
        "no learning rate at batch 16 ended below its first loss (9, the mean over seeds); "
    )


def test_an_interval_that_contains_every_rule_distinguishes_none() -> None:
    used = (Optimum(16, 1, 1, None), Optimum(64, 1, 1, None), Optimum(1024, 1, 1, None))
    assert not law_of(PowerLaw(1, 0.5, Interval(-15, 16), used, ()), powers()).tells_apart
    assert law_of(PowerLaw(1, 0.5, Interval(0.2, 16), used, ()), powers()).tells_apart
    spec = study(base_lrs=tuple(np.geomspace(0.001, 100, 21)), base_lr_range=None, target=None)
    best = dict(zip(spec.batches, (0.01, 3.0, 0.02, 5.0, 0.03), strict=True))
    sentences = verdict_sentences(first_group(spec, valleys(best, spec.rates, (0, 1))))
    assert sentences[0].endswith(
        "contains linear (1), sqrt (0.5) and none (0), so the data do not distinguish the rules."
    )


# With insufficient trials, each missing finding has a reason.


@pytest.mark.parametrize(
    ("spec", "change", "reason"),
    [
        (study(target=1e-9), lambda each: each, "no trial reached the target of 1e-09"),
        (study(batches=(16,)), lambda each: each, "the study has one batch (16), but a power law needs two or more"),
        (study(base_lr_range=LogRange(3, 30, 4)), lambda each: each, "every learning rate diverged at batch 16; add lower ones"),
        (study(), lambda each: replace(each, state="failed", curve=(), message="gone"), "no trial at batch 16 is complete"),
        (study(), lambda each: replace(each, state="waiting", curve=()), "160 trials that have not finished"),
        (study(base_lr_range=LogRange(1e-6, 1e-5, 4)), lambda each: each, "is the highest one that was tried; add higher"),
        (study(target=None), lambda each: each, "No critical batch: the study has no target"),
        (study(base_lr_range=LogRange(3, 30, 4)), lambda each: each, "No critical batch: every trial diverged."),
        (study(batches=(16,)), lambda each: each, "No critical batch: the study has one batch (16)"),
        (study(batches=(16,)), lambda each: each, "Batches other than 16,"),
        (study(optimizers=("own",)), lambda each: each, "Optimizers other than the job's own."),
        (study(seeds=(0,)), lambda each: each, "Chance between seeds"),
        (study(scheduler="asha", samples=900, warmups=(100,)), lambda each: replace(each, state="stopped"), "first compares trials at 100"),
    ],
)  # fmt: skip
def test_missing_findings_have_a_reason(
    spec: StudySpec, change: Callable[[TrialRecord], TrialRecord], reason: str
) -> None:
    findings = find(spec, [change(each) for each in quadratic_records(spec, 1_000_000)])
    sentences = [text for found in findings.groups for text in verdict_sentences(found)] + list(
        untested_sentences(findings)
    )
    assert any(reason in text for text in sentences), sentences


@pytest.mark.parametrize(
    ("rules", "first_rung", "longest"),
    [(("none",), 99, "100"), (("none",), 101, ""), (("none", "legw"), 1600, "1,600")],
)
def test_a_first_rung_within_a_scaled_warmup_is_reported(rules: tuple[Any, ...], first_rung: int, longest: str) -> None:
    note = early_rung_warning(study(scheduler="asha", samples=9000, warmups=(100,), rules=rules, first_rung=first_rung))
    assert bool(note) == bool(longest)
    assert f"up to {longest};" in note or not longest


def test_a_rule_with_an_optimizer_that_it_is_not_known_for_gives_a_warning() -> None:
    findings = find(study(rules=("none", "linear"), optimizers=("adamw",)), [])
    assert findings.groups[0].main.laws == (), "a study without records has findings"
    assert any(
        text.startswith("linear is only known to hold for LARS, SGD, but the optimizer is AdamW")
        for text in findings.warnings
    )


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(500, 900, "700"), (500, inf, "> 500"), (0, 900, "< 900")],
)
def test_a_critical_batch_without_bounds_is_not_a_number(low: float, high: float, words: str) -> None:
    assert critical_batch_text(ParetoFit(10, 7000, 700, Interval(low, high), False)) == words


def test_steps_that_do_not_bound_the_critical_batch_give_none() -> None:
    spec = study(batches=(16, 64, 256), base_lrs=(0.1, 0.2, 0.4), base_lr_range=None, seeds=(0,), target=4.5)
    records = [
        record(batch, rate, lowest if rate == 0.2 else 5.0)
        for batch, lowest in ((16, 4.5), (64, -36.0), (256, 4.5))  # 10 steps, 1 and 10
        for rate in spec.rates
    ]
    found = first_group(spec, records)
    assert [each.fewest and each.fewest.steps for each in found.main.batches] == [(10.0,), (1.0,), (10.0,)]
    assert found.pareto is None
    assert any("steps to the target do not bound it on either side" in text for text in verdict_sentences(found))
