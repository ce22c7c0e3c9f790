"""Learning rate of a worker group, which is the schedule times the factor of the batch rule, and its transfer to an optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from undula.errors import UsageError
from undula.plan.noise import Measured
from undula.plan.plan import Plan
from undula.plan.rules import RULES, Ramp, RuleName, Scaled, scaled_beta, warning
from undula.plan.schedule import Schedule, ScheduleSpec
from undula.state.events import BatchEvent
from undula.state.values import decode, encode
from undula.train.given import RECORD

GROUP_RATES = "schedule.group_rates"
SCHEDULER = "schedule.scheduler"
AVERAGES = ("betas", "alpha", "eps")
"""Settings of an optimizer's groups that a rule can change in addition to the learning rate. alpha is RMSprop's name for a beta."""


@dataclass(frozen=True)
class StepRate:
    """Learning rate of one step, and the other settings that the batch rule changes."""

    lr: float
    """Factor on the learning rate that the script gave to its optimizer."""
    scaled: Scaled
    """Changes by the rule for the full batch of the step. Unlike `lr` above, its `lr` ignores the re-warmup."""
    clock: float
    """Position of the schedule after the step, in samples of the base batch."""


@dataclass(frozen=True)
class Rate:
    """Factor on the base learning rate for each step of a worker group."""

    schedule: Schedule
    rule: RuleName
    base_batch: int
    """Number of samples in a step for which the rule changes nothing."""
    batch: int
    """Number of samples in a global batch."""
    batches: int = 1
    """Number of global batches in a step of this group."""
    ramp: Ramp | None = None
    """Transition of the batch size that the rule sees; None unless the batch is elastic."""

    def at(self, samples: int, step_samples: int, span: int, measured: Measured) -> StepRate:
        """Return the learning rate of a step.

        Args:
            samples: Number of samples that the run has consumed after the step.
            step_samples: Number of samples in the step.
            span: Number of steps of the plan that the step merges; at the end of an epoch it can be smaller than `batches`.
            measured: Measurements of the run up to the step.
        """
        kappa = span * self.batch / self.base_batch
        seen = min(self.ramp.at(samples), kappa) if self.ramp else kappa
        noise = None if measured.noise.samples is None else measured.noise.samples / self.base_batch
        scaled = RULES[self.rule].scaled(seen, noise)
        # A short step at the end of an epoch advances the clock in proportion to its samples.
        clock = samples if scaled.gain is None else measured.clock + step_samples * scaled.gain / kappa
        return StepRate(scaled.lr * self.schedule.multiplier(clock), RULES[self.rule].scaled(kappa, noise), clock)

    def values(self) -> Mapping[str, Any]:
        """Return the values that a checkpoint stores, so that a resumed run continues with the same learning rate."""
        return {"batches": self.batches, "ramp": self.ramp.values()} if self.ramp else {}


def rate_for(
    schedule: ScheduleSpec, plan: Plan, cells: int, start: int, former: Mapping[str, Any]
) -> tuple[Rate, BatchEvent | None]:
    """Return the rate of a group that starts at step `start`, and an event if its batch size differs from before or from the base batch.

    Args:
        schedule: Spec of the schedule.
        plan: Plan of the run.
        cells: Number of cells of the group.
        start: Number of committed steps.
        former: Values that `Rate.values` returned for the rate before `start`; empty at the beginning of the run.
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


class OptimizerRates(Protocol):
    """Learning rates of an optimizer's groups over the course of the run."""

    warning: str | None
    """Warning that the rule may not hold for the optimizer; None if there is none."""
    others: str | None
    """Description of the groups' rates if none of them is the rate that `lr` returns; otherwise None."""

    def lr(self, rate: StepRate) -> float:
        """Return the learning rate of a step, for the ledger."""

    def set(self, optimizer: torch.optim.Optimizer, rate: StepRate) -> None:
        """Set the learning rates of a step before the optimizer takes it."""

    def advance(self) -> None:
        """Go on to the next step, after the optimizer has taken one."""

    def values(self) -> Mapping[str, Any]:
        """Return the values that a checkpoint stores, by name."""

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the values that `values` returned."""


def rates_of(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, schedule: ScheduleSpec, plan: Plan
) -> OptimizerRates:
    """Return the learning rates that a scheduler of the script sets, or else those of the job's schedule."""
    return GroupRates(optimizer, schedule, plan) if scheduler is None else SchedulerRates(scheduler, schedule, plan)


class SchedulerRates:
    """Learning rates that a scheduler of the script sets. Its state is part of the run's.

    Raises:
        UsageError: The run cannot use the scheduler, or the job's schedule would have no effect.
    """

    warning: str | None = None
    others: str | None = None

    def __init__(self, scheduler: LRScheduler, schedule: ScheduleSpec, plan: Plan):
        self._scheduler = scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "run.optimizer() got a ReduceLROnPlateau, which needs a metric at each of its steps; use a scheduler that depends on the "
                "number of steps only"
            )
        if schedule.follows_batch(plan.spec):
            key = "plan.batch=elastic" if plan.spec.batch == "elastic" else "schedule.base_batch"
            raise UsageError(
                f"run.optimizer() got a scheduler, but {key} scales the learning rate of the job's schedule, which a scheduler replaces; "
                "remove one of them"
            )
        if schedule != ScheduleSpec(base_lr=schedule.base_lr, base_batch=schedule.base_batch):
            raise UsageError(
                "run.optimizer() got a scheduler, which replaces the job's schedule, but the job sets more of it than schedule.base_lr; "
                "remove the other keys below schedule, or the scheduler"
            )
        self.values()  # refuses what no checkpoint can hold
        self._position = self._last_epoch()

    def lr(self, rate: StepRate) -> float:
        return float(self._scheduler.optimizer.param_groups[0]["lr"])

    def set(self, optimizer: torch.optim.Optimizer, rate: StepRate) -> None:
        """Do nothing: the scheduler has set the rates when it was made or when it advanced.

        Raises:
            UsageError: The script has advanced the scheduler itself.
        """
        if self._last_epoch() != self._position:
            raise UsageError(
                "scheduler.step() was called by the script, but step.update() advances the scheduler that run.optimizer() got; remove the "
                "call"
            )

    def advance(self) -> None:
        self._scheduler.step()
        self._position = self._last_epoch()

    def _last_epoch(self) -> int | None:
        """Return the number of the scheduler's steps; None for an object that only acts as a scheduler."""
        return getattr(self._scheduler, "last_epoch", None)

    def values(self) -> Mapping[str, Any]:
        tensors: dict[str, torch.Tensor] = {}
        state = encode(SCHEDULER, self._scheduler.state_dict(), tensors)
        if tensors:
            raise UsageError(f"{next(iter(tensors))} is a tensor; use a scheduler that computes with numbers")
        return {SCHEDULER: state}

    def restore(self, values: Mapping[str, Any]) -> None:
        if SCHEDULER in values:
            self._scheduler.load_state_dict(decode(values[SCHEDULER], {}))
            self._position = self._last_epoch()


class GroupRates:
    """Sets the learning rates of an optimizer's groups, as multiples of the rates that the script gave to the groups.

    Raises:
        SpecError: The rule would make a beta zero or negative for the largest batch that this run can reach.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: ScheduleSpec, plan: Plan):
        self._base_lr = schedule.base_lr
        self._initial = [_initial_settings(group) for group in optimizer.param_groups]
        self._num_first_groups = len(self._initial)
        self._optimizer = optimizer
        self._rates = [initial["lr"] for initial in self._initial]
        """Rates of the groups as they were set or restored last."""
        largest = plan.batch_factor(plan.spec.virtual_workers) * plan.spec.global_batch / schedule.base_of(plan.spec)
        for initial in self._initial:
            _scaled_averages(initial, RULES[schedule.batch_rule].scaled(largest, None))  # raises SpecError
        classes = [base.__name__ for base in type(optimizer).__mro__ if issubclass(base, torch.optim.Optimizer)]
        self.warning = warning(schedule.batch_rule, classes) if schedule.follows_batch(plan.spec) else None
        self.others = (
            None
            if schedule.base_lr in self._rates
            else f"they have {self._rates}, and schedule.base_lr is {schedule.base_lr}"
        )

    def lr(self, rate: StepRate) -> float:
        """Return the learning rate of a group whose initial rate is the base rate."""
        return self._base_lr * rate.lr

    def advance(self) -> None:
        """Note the rates, which the optimizer itself may have changed. The schedule follows from the number of samples."""
        self._rates = _lrs_of(self._optimizer)

    def set(self, optimizer: torch.optim.Optimizer, rate: StepRate) -> None:
        """Set the learning rate of each group, and the averages that the rule scales.

        Raises:
            UsageError: The script has changed a rate itself, which would have no effect.
        """
        self._refuse_changes(optimizer)
        self._initial += [_initial_settings(group) for group in optimizer.param_groups[len(self._initial) :]]
        for group, initial in zip(optimizer.param_groups, self._initial, strict=True):
            group.update(_scaled_averages(initial, rate.scaled))
            group["lr"] = initial["lr"] * rate.lr
        self._rates = _lrs_of(optimizer)

    def _refuse_changes(self, optimizer: torch.optim.Optimizer) -> None:
        rates = _lrs_of(optimizer)[: len(self._rates)]
        for number, (known, now) in enumerate(zip(self._rates, rates, strict=True)):
            if known != now:
                raise UsageError(
                    f"the script changed the learning rate of parameter group {number} from {known:g} to {now:g}, but each step sets it by "
                    "the job's schedule; set the schedule in the job's YAML, or give the scheduler to run.optimizer(), which adapters take "
                    "from accelerator.prepare() or configure_optimizers()"
                )

    def values(self) -> Mapping[str, Any]:
        """Return the initial settings of all groups for a checkpoint, if the script has added groups during training."""
        return {GROUP_RATES: self._initial} if len(self._initial) > self._num_first_groups else {}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the initial settings: those that the script has given, and for the groups that it added before the checkpoint those that
        `values` returned."""
        self._rates = _lrs_of(self._optimizer)  # of the restored state, if there is one
        for number, group in enumerate(values.get(RECORD, {}).get("groups", ())):
            self._initial[number] = _initial_settings(decode(group["settings"], {}))
        self._initial += [dict(initial) for initial in values.get(GROUP_RATES, ())[len(self._initial) :]]


def _lrs_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _initial_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that the rate and the rule change, as the script set them."""
    averages = {key: group[key] for key in AVERAGES if key in group}
    return {
        "lr": float(group["lr"]),
        **{key: list(value) if isinstance(value, tuple) else value for key, value in averages.items()},
    }


def _scaled_averages(initial: Mapping[str, Any], scaled: Scaled) -> dict[str, Any]:
    """Return a group's averages as the rule scales them; empty if the rule keeps them."""
    if scaled.one_minus_beta is None:
        return {}
    averages: dict[str, Any] = {}
    if "betas" in initial:
        averages["betas"] = tuple(scaled_beta(beta, scaled.one_minus_beta) for beta in initial["betas"])
    if "alpha" in initial:
        averages["alpha"] = scaled_beta(initial["alpha"], scaled.one_minus_beta)
    if averages and "eps" in initial:
        averages["eps"] = initial["eps"] * scaled.eps
    return averages
