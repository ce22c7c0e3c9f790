"""Tests of a plan's answers to targets."""

from dataclasses import replace

import pytest

from undula.config.job import JobSpec
from undula.driver.count_job import JobCount
from undula.driver.plan_job import Planned, target_of
from undula.driver.plan_table import dollars_text, hours_text, rate_text
from undula.errors import SpecError
from undula.parallel.spec import ActivationsSpec
from undula.plan.memory import StateCount
from undula.train.dry_run.counting import Setting

COUNTED = JobCount(JobSpec(name="job"), StateCount(*[0] * 10), {}, True, 1, 512)
PLANNED = Planned(Setting("fp32", ActivationsSpec(), 1), COUNTED, ())


def test_tokens_are_a_target_only_if_they_are_known() -> None:
    target = target_of("tokens/s=5e4")
    assert (target.kind, target.limit) == ("tokens/s", 5e4)
    assert PLANNED.choice(target) is None, "there are no configurations"
    unknown = replace(PLANNED, counted=replace(COUNTED, tokens=None))
    assert unknown.choice(target_of("samples/s=5")) is None
    with pytest.raises(
        SpecError, match=r"--target tokens/s=N needs batches whose integer tensors are \[samples, length\]"
    ):
        unknown.choice(target)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.5234, "0.52"), (7.31, "7.3"), (1864, "1,864"), (31_234, "31.2k"), (1.25e6, "1.25M"), (2e7, "20M")],
)
def test_rates_fit_into_the_table(rate: float, text: str) -> None:
    assert rate_text(rate) == text


@pytest.mark.parametrize(
    ("hours", "text"), [(0.2, "12 min"), (41.92, "41.9 h"), (161.7, "162 h"), (1810.0, "75 d"), (30_000.0, "1,250 d")]
)
def test_durations_fit_into_the_table(hours: float, text: str) -> None:
    assert hours_text(hours) == text


@pytest.mark.parametrize(
    ("dollars", "text"), [(None, "–"), (72.187, "$72.19"), (1288.4, "$1,288"), (112_389.0, "$112k")]
)
def test_prices_fit_into_the_table(dollars: float | None, text: str) -> None:
    assert dollars_text(dollars) == text
