"""Tests of the predictions of rules from the base batch, and their cost: bounds stay bounds."""

from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest
from study_records import first_group, points, prediction, record, study, valley, valleys

from undula.study.findings import Prediction, find
from undula.study.rates import LossAt, loss_at
from undula.study.render.report_tables import predictions_table
from undula.study.spec import LogRange
from undula.study.verdicts import verdict_sentences


def test_predictions_follow_the_rule_from_the_tuned_base_rate() -> None:
    spec = study(batches=(16, 64), target=None, base_lr_range=LogRange(0.01, 10, 13))
    linear = prediction(spec, valleys({16: 0.1, 64: 0.4}, spec.rates))
    assert linear.rate == pytest.approx(0.4, rel=1e-3)
    assert linear.tuned == pytest.approx(0.4, rel=1e-3)


def test_a_loss_at_an_untried_rate_is_interpolated() -> None:
    found = points(16, (0.1, 2.0, "complete"), (0.4, 1.0, "complete"), (1.6, nan, "diverged"), (6.4, 5.0, "complete"))
    assert loss_at(found, 0.1) == LossAt(2.0, "complete")
    assert loss_at(found, 0.2) == LossAt(pytest.approx(1.5), "complete", is_between=True)
    assert loss_at(found, 1.6) == LossAt(None, "diverged")
    assert loss_at(found, 0.05) == loss_at(found, 0.8) == loss_at(found, 9) == LossAt()


def test_a_rule_costs_the_loss_at_its_predicted_rate() -> None:
    spec = study(batches=(16, 64), target=None, base_lrs=tuple(np.geomspace(0.01, 10, 13)), base_lr_range=None)
    records = valleys({16: 0.1, 64: 0.1}, spec.rates)
    for rule, factor in (("none", 1), ("sqrt", 2), ("linear", 4)):
        assert prediction(spec, records, rule).at_rate.loss == pytest.approx(1 + np.log(factor) ** 2, abs=0.1)


@pytest.mark.parametrize(
    ("bound", "tuned_bound", "ratio"),
    [(None, None, (None, 2.0)), (None, "≥", ("≤", 2.0)), (None, "≤", ("≥", 2.0)), ("≥", None, ("≥", 2.0)), ("≥", "≤", ("≥", 2.0)),
     ("≥", "≥", None), (None, "~", ("~", 2.0)), ("~", "~", ("~", 2.0)), ("~", "≥", None)],
)  # fmt: skip
def test_a_ratio_of_bounds_is_a_bound(bound: Any, tuned_bound: Any, ratio: Any) -> None:
    assert Prediction("linear", 64, 0.2, bound, 0.1, tuned_bound, LossAt(), None).ratio == ratio


@pytest.mark.parametrize(
    ("is_between", "tuned_bound", "bound"),
    [(False, None, None), (True, None, "~"), (False, "≥", "≥"), (False, "~", "≥"), (True, "≤", "~")],
)
def test_a_cost_of_bounds_is_a_bound(is_between: bool, tuned_bound: Any, bound: Any) -> None:
    at_rate = LossAt(3.0, "complete", is_between)
    assert Prediction("linear", 64, 0.2, None, 0.1, tuned_bound, at_rate, 1.0).cost == (bound, 2.0)
    assert Prediction("linear", 64, 0.2, None, 0.1, tuned_bound, LossAt(), 1.0).cost is None


def test_a_prediction_from_a_bound_is_a_bound() -> None:
    spec = study(batches=(16, 64), target=None, base_lrs=(0.1, 0.2, 0.4), base_lr_range=None)
    for best, bound in ((0.01, "≤"), (4.0, "≥")):
        linear = prediction(spec, valleys({16: best, 64: best}, spec.rates))
        assert (linear.bound, linear.tuned_bound) == (bound, bound)
        assert linear.ratio is None
        assert linear.at_rate == LossAt(), "the rate is unknown"
    assert prediction(spec, valleys({16: 0.1, 64: 0.1}, (0.1,))).bound == "~"


def test_a_rule_whose_rate_is_an_upper_bound_is_not_reported_as_diverging() -> None:
    spec = study(batches=(16, 64), target=None, base_lrs=(0.1, 0.2, 0.4), base_lr_range=None)
    records = [*valley(16, 0.01, spec.rates), *valley(64, 0.2, (0.1, 0.2)), record(64, 0.4, nan, "diverged")]
    linear = prediction(spec, records)
    assert (linear.rate, linear.bound) == (pytest.approx(0.4), "≤")
    assert not any("rates that diverged" in text for text in verdict_sentences(first_group(spec, records)))


def test_the_table_of_predictions_has_bounds_and_outcomes() -> None:
    found = find(study(batches=(16, 64)), [])
    ways = {
        Prediction("linear", 64, 0.2, None, 0.1, "≥", LossAt(3.0, "complete", True), 1.0): ["2.00", "~ 3.000", "≤ 1.000", "~ +2"],
        Prediction("linear", 64, 0.2, None, 0.1, "≥", LossAt(3.0, "complete"), 1.0): ["≤ 2.00", "3.000", "≤ 1.000", "≥ +2"],
        Prediction("linear", 64, 0.2, "≤", 0.1, None, LossAt(), 1.0): ["≤ 2.00", "–", "1.000", "–"],
        Prediction("surge", 64, 0.2, "≤", 0.1, None, LossAt(None, "diverged"), 1.0): ["≤ 2.00", "diverged", "1.000", "–"],
        Prediction("linear", 64, 9.0, None, 0.1, None, LossAt(), 1.0): ["90.00", "not trained", "1.000", "–"],
    }  # fmt: skip
    groups = (replace(found.groups[0], predictions=tuple(ways)),)
    rows = predictions_table(replace(found, groups=groups)).rows
    for row, cells in zip(rows, ways.values(), strict=True):
        shown = [cell.text for cell in row][-4:]
        assert shown[1:] == cells[1:]
        assert shown[0].removeprefix("≤ ") == cells[0].removeprefix("≤ ")
