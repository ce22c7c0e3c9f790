"""Checks of the shapes of the schedule by their means, which are integrals in closed form, and of its lengths."""

from collections.abc import Iterator
from math import cos, log, pi, sqrt
from typing import Any

from undula.plan.plan import Plan, PlanSpec
from undula.plan.schedule import Schedule, ScheduleSpec
from undula.study.checks.rows import EXACT, Row

PLAN = Plan(PlanSpec(global_batch=10, virtual_workers=1, epochs=10), 1000)
TOTAL, WARMUP, POINTS = 10_000, 2000, 4000
INTEGRAL = 1e-4
"""Tolerance of a mean over POINTS points."""


def schedule(**settings: Any) -> Schedule:
    return ScheduleSpec(**settings).over(PLAN)


def mean(shape: Schedule, begin: float, end: float) -> float:
    """Return the mean multiplier between two numbers of samples."""
    places = (begin + (end - begin) * (point + 0.5) / POINTS for point in range(POINTS))
    return sum(map(shape.multiplier, places)) / POINTS


def schedules() -> Iterator[Row]:
    """Check the warmups, the decays and the units of their lengths."""
    rises = {"constant": 0.1, "linear": 0.55, "exponential": 0.9 / log(10)}
    for name, known in rises.items():
        rise = schedule(warmup=name, warmup_samples=WARMUP, warmup_begin=0.1)
        yield f"mean of a {name} warmup from 0.1", known, mean(rise, 0, WARMUP), INTEGRAL
    yield "exponential warmup from 0.1, at half", sqrt(0.1), rise.multiplier(WARMUP / 2), EXACT
    falls: tuple[tuple[str, float, dict[str, Any]], ...] = (
        ("constant", 1.0, {}),
        ("cosine to 0.1", 0.55, {"final_fraction": 0.1}),
        ("polynomial of power 2 to 0.1", 0.1 + 0.9 / 3, {"final_fraction": 0.1, "decay_power": 2.0}),
        ("step at 0.5 and 0.75", 0.5 + 0.25 * 0.1 + 0.25 * 0.01, {"decay_at": (0.5, 0.75)}),
        ("wsd over the last fifth", 0.8 + 0.2 * 0.55, {"decay_fraction": 0.2, "final_fraction": 0.1}),
    )
    for text, known, settings in falls:
        yield f"mean of {text}", known, mean(schedule(decay=text.split()[0], **settings), 0, TOTAL), INTEGRAL
    root = schedule(decay="inverse_sqrt", warmup_samples=WARMUP)
    known = 2 * (sqrt(WARMUP * TOTAL) - WARMUP) / (TOTAL - WARMUP)
    yield "mean of inverse_sqrt after its warmup", known, mean(root, WARMUP, TOTAL), INTEGRAL
    late = schedule(decay="cosine", warmup_samples=WARMUP, final_fraction=0.0)
    quarter = WARMUP + (TOTAL - WARMUP) / 4
    yield "cosine after a warmup, at a quarter", (1 + cos(pi / 4)) / 2, late.multiplier(quarter), EXACT
    yield "warmup of half an epoch, in samples", 500.0, schedule(warmup_epochs=0.5).warmup_samples, EXACT
    yield "warmup of 3 steps, in samples", 60.0, schedule(warmup_steps=3, base_batch=20).warmup_samples, EXACT
    short = schedule(decay="polynomial", decay_samples=4000, final_fraction=0.0)
    yield "decay over 4,000 samples, at 3,000", 0.25, short.multiplier(3000), EXACT
