"""The learning rate of a worker group: the schedule, times a factor that follows an elastic batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from undula.plan.plan import Plan
from undula.plan.rules import RULES, LrFactor
from undula.plan.schedule import ScheduleSpec
from undula.state.ledger import Event


@dataclass(frozen=True)
class Rate:
    """What the base learning rate is multiplied with, step by step."""

    schedule: ScheduleSpec
    total_samples: int
    batches: int = 1
    """Global batches in a step of this group."""
    factor: LrFactor | None = None
    """Of an elastic batch."""

    def multiplier(self, samples: int, span: int) -> float:
        """Of the step of `span` global batches that brings the run to `samples`; at an epoch's end it may be a smaller one."""
        factor = 1.0
        if self.factor:
            factor = min(self.factor.at(samples, self.schedule.rewarm_samples), RULES[self.schedule.batch_rule](span))
        return factor * self.schedule.multiplier(samples, self.total_samples)

    def values(self) -> Mapping[str, Any]:
        """What a checkpoint must hold to go on from here."""
        return {"batches": self.batches, "lr_factor": self.factor.values()} if self.factor else {}


def rate_for(
    schedule: ScheduleSpec, plan: Plan, world_size: int, start: int, former: Mapping[str, Any]
) -> tuple[Rate, Event | None]:
    """The rate of a group that goes on from step `start`, and what changes with it.

    Args:
        former: `values()` of the rate that the run had up to there; empty at its beginning.
    """
    if plan.spec.batch != "elastic":
        return Rate(schedule, plan.total_samples), None
    batches = plan.batch_factor(world_size)
    end = RULES[schedule.batch_rule](batches)
    before = LrFactor(**former["lr_factor"]) if former else None
    samples = plan.step(start).samples_before
    factor = before.towards(end, samples, schedule.rewarm_samples) if before else LrFactor(end, end)
    rate = Rate(schedule, plan.total_samples, batches, factor)
    if former and former["batches"] == batches:
        return rate, None
    message = f"steps of {batches * plan.spec.global_batch} samples, learning rate times {end:g}"
    if before and end > before.end and schedule.rewarm_samples:
        message += f" after {schedule.rewarm_samples} samples"
    return rate, Event("batch", message, start, {"batches": batches, **factor.values()})
