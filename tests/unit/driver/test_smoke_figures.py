"""Tests of what follows from a smoke test for the whole run."""

from dataclasses import replace

import pytest

from undula.cluster.prices import load_prices
from undula.config.job import JobSpec
from undula.driver.smoke_figures import Measured, WholeRun, summary
from undula.plan.plan import Plan, PlanSpec
from undula.state.spec import CheckpointSpec
from undula.train.job import ValidationSpec

SPEC = JobSpec(
    name="job",
    plan=PlanSpec(global_batch=10, virtual_workers=2, epochs=3),
    validation=ValidationSpec(every_steps=4),
    checkpoint=CheckpointSpec(every_steps=5, keep=2),
)
PLAN = Plan(SPEC.plan, num_rows=100)
MEASURED = Measured(
    start_s=7.0,
    first_step_s=3.0,
    step_s=2.0,
    step_samples=10,
    validation_s=6.0,
    has_interval=True,
    checkpoint_s=4.0,
    blocked_s=0.5,
    checkpoint_bytes=10**9,
    host_bytes=2**31,
    device_bytes=None,
    workers=(),
)


def test_the_whole_run_has_all_steps_validations_and_checkpoints() -> None:
    """30 steps, of which the first takes a second longer, validations at 0, 4, ..., 28 and 30, and 6 checkpoints."""
    assert WholeRun.of(MEASURED, SPEC, PLAN) == WholeRun(30, 9, 6, 7 + 30 * 2 + 1 + 9 * 6 + 6 * 0.5 + 4)


def test_validations_of_the_script_are_named_and_not_counted() -> None:
    measured = replace(MEASURED, has_interval=False)
    assert WholeRun.of(measured, SPEC, PLAN).seconds == 7 + 30 * 2 + 1 + 6 * 0.5 + 4
    (line,) = [line for line in summary(20.0, measured, SPEC, PLAN, load_prices()) if "whole run" in line]
    assert line.endswith("1 min 15 s for 30 steps, with 6 checkpoints; each validation of the script adds 6 s")


def test_the_price_is_that_of_the_worker_and_its_machine() -> None:
    place = {"node": "a", "machine": "g6.xlarge", "market": "on-demand", "region": "us-west-2", "share": 0.5}
    lines = summary(20.0, replace(MEASURED, workers=(place,)), SPEC, PLAN, load_prices())
    (price,) = [line for line in lines if "price" in line]
    assert "$" in price
    hourly = load_prices().lists
    expected = next(each.on_demand["g6.xlarge"] for each in hourly if "g6.xlarge" in each.on_demand)
    assert float(price.split("$")[1].split()[0]) == pytest.approx(129 / 3600 * expected / 2, rel=0.01)
    unknown = summary(20.0, replace(MEASURED, workers=({**place, "machine": "x1.none"},)), SPEC, PLAN, load_prices())
    assert "not known for on-demand x1.none; name a price file in UNDULA_PRICES" in unknown[-1]
    assert not [line for line in summary(20.0, MEASURED, SPEC, PLAN, load_prices()) if "price" in line]


def test_the_memory_is_that_of_the_host_and_of_a_gpu() -> None:
    def memory(**changes: int | None) -> list[str]:
        lines = summary(20.0, replace(MEASURED, **changes), SPEC, PLAN, load_prices())
        return [line.split(maxsplit=1)[1] for line in lines if "memory" in line]

    assert memory() == ["2.00 GiB on the host, at the worker's peak"]
    assert memory(device_bytes=2**29) == ["2.00 GiB on the host and 0.50 GiB on the GPU, at the worker's peak"]
    assert memory(host_bytes=None) == [], "the report of the worker was lost"
