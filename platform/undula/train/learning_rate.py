"""The learning rate of a worker group: the schedule, times what the rule makes of the batch; and how it gets into an optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from undula.plan.noise import Measured
from undula.plan.plan import Plan
from undula.plan.rules import RULES, Ramp, RuleName, Scaled, scaled_beta, warning
from undula.plan.schedule import Schedule, ScheduleSpec
from undula.state.events import BatchEvent

GROUP_RATES = "schedule.group_rates"
AVERAGES = ("betas", "alpha", "eps")
"""Of an optimizer's groups: what a rule may change beside the rate. alpha is RMSprop's name for a beta."""


@dataclass(frozen=True)
class StepRate:
    """Of one step."""

    lr: float
    """Factor on the learning rate that the script's optimizer was made with."""
    scaled: Scaled
    """By the rule, for the whole batch of the step; its lr is not on the way to there."""
    clock: float
    """Of the schedule after the step, in samples of the base batch."""


@dataclass(frozen=True)
class Rate:
    """What the base learning rate is multiplied with, step by step."""

    schedule: Schedule
    rule: RuleName
    base_batch: int
    """Samples of a step for which the rule changes nothing."""
    batch: int
    """Samples of a global batch."""
    batches: int = 1
    """Global batches in a step of this group."""
    ramp: Ramp | None = None
    """Of an elastic batch."""

    def at(self, samples: int, step_samples: int, span: int, measured: Measured) -> StepRate:
        """Of the step of `span` global batches that brings the run to `samples`; at an epoch's end it may be a smaller one."""
        kappa = span * self.batch / self.base_batch
        seen = min(self.ramp.at(samples), kappa) if self.ramp else kappa
        noise = None if measured.noise.samples is None else measured.noise.samples / self.base_batch
        scaled = RULES[self.rule].scaled(seen, noise)
        # A short step at an epoch's end moves the clock by its part.
        clock = samples if scaled.gain is None else measured.clock + step_samples * scaled.gain / kappa
        return StepRate(scaled.lr * self.schedule.multiplier(clock), RULES[self.rule].scaled(kappa, noise), clock)

    def values(self) -> Mapping[str, Any]:
        """What a checkpoint must hold to go on from here."""
        return {"batches": self.batches, "ramp": self.ramp.values()} if self.ramp else {}


def rate_for(
    schedule: ScheduleSpec, plan: Plan, cells: int, start: int, former: Mapping[str, Any]
) -> tuple[Rate, BatchEvent | None]:
    """The rate of a group that goes on from step `start`, and what changes with it.

    Args:
        cells: number of cells of the group.
        former: `values()` of the rate that the run had up to there; empty at its beginning.
    """
    base, batch = schedule.base_of(plan.spec), plan.spec.global_batch
    batches = plan.batch_factor(cells)
    kappa = batches * batch / base
    rule = schedule.batch_rule if schedule.follows_batch(plan.spec) else "none"
    rate = Rate(schedule.over(plan), rule, base, batch, batches)
    if plan.spec.batch != "elastic":
        if kappa == 1 or start:
            return rate, None
        return rate, _batch_event(rate, 0.0, start)
    before = Ramp(**former["ramp"]) if "ramp" in former else None
    length = 0.0
    if before and kappa > before.end:
        length = schedule.rewarm_samples * RULES[rule].scaled(kappa / before.end, None).warmup
    ramp = before.towards(kappa, plan.step(start).samples_before, length) if before else Ramp(kappa, kappa)
    rate = replace(rate, ramp=ramp)
    if former.get("batches") == batches:
        return rate, None
    return rate, _batch_event(rate, length, start)


def _batch_event(rate: Rate, warmup_samples: float, step: int) -> BatchEvent:
    samples = rate.batches * rate.batch
    factor = samples / rate.base_batch
    lr_factor = None if RULES[rate.rule].is_measured else RULES[rate.rule].scaled(factor, None).lr
    return BatchEvent(samples, rate.rule, factor, lr_factor, warmup_samples, rate.batches, step=step)


class GroupRates:
    """Moves an optimizer along the rate, from what the script made it with.

    Raises:
        SpecError: the rule's averages would forget more than there is, for a batch that this run may come to.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: ScheduleSpec, plan: Plan):
        self._made = [_made(group) for group in optimizer.param_groups]
        self._own = len(self._made)
        largest = plan.batch_factor(plan.spec.virtual_workers) * plan.spec.global_batch / schedule.base_of(plan.spec)
        for made in self._made:
            _with_averages(made, RULES[schedule.batch_rule].scaled(largest, None))  # raises
        classes = [each.__name__ for each in type(optimizer).__mro__ if issubclass(each, torch.optim.Optimizer)]
        self.warning = warning(schedule.batch_rule, classes) if schedule.follows_batch(plan.spec) else None
        """Why the rule may not hold for the optimizer; None where it is known to."""

    def set(self, optimizer: torch.optim.Optimizer, rate: StepRate) -> None:
        """Set the learning rate, and the averages that the rule scales, of each group."""
        self._made += [_made(group) for group in optimizer.param_groups[len(self._made) :]]
        for group, made in zip(optimizer.param_groups, self._made, strict=True):
            group.update(_with_averages(made, rate.scaled))
            group["lr"] = made["lr"] * rate.lr

    def values(self) -> Mapping[str, Any]:
        """What a checkpoint must hold of groups that the script adds while it trains: what they were made with."""
        return {GROUP_RATES: self._made} if len(self._made) > self._own else {}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take over `values()` for the groups that the script had added before."""
        self._made += [dict(made) for made in values.get(GROUP_RATES, ())[len(self._made) :]]


def _made(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group was made with, of what the rate and the rule set."""
    found = {key: group[key] for key in AVERAGES if key in group}
    return {
        "lr": float(group["lr"]),
        **{key: list(value) if isinstance(value, tuple) else value for key, value in found.items()},
    }


def _with_averages(made: Mapping[str, Any], scaled: Scaled) -> dict[str, Any]:
    """The values of a group's averages as a rule scales them; none where it leaves them alone."""
    if scaled.one_minus_beta is None:
        return {}
    found: dict[str, Any] = {}
    if "betas" in made:
        found["betas"] = tuple(scaled_beta(beta, scaled.one_minus_beta) for beta in made["betas"])
    if "alpha" in made:
        found["alpha"] = scaled_beta(made["alpha"], scaled.one_minus_beta)
    if found and "eps" in made:
        found["eps"] = made["eps"] * scaled.eps
    return found
