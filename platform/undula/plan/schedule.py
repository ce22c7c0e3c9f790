"""Learning-rate schedules, clocked in samples so that they mean the same at any batch size."""

from dataclasses import dataclass
from itertools import pairwise
from math import cos, pi, sqrt
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.plan.plan import STRICT, Plan, PlanSpec, Positive
from undula.plan.rules import RULES, RuleName, Scaled

Length = Literal["warmup_samples", "warmup_epochs", "warmup_steps"]
LENGTHS: tuple[Length, ...] = ("warmup_samples", "warmup_epochs", "warmup_steps")


@checked_dataclass(frozen=True, config=STRICT)
class ScheduleSpec:
    """How the learning rate moves over the run."""

    base_lr: Annotated[float, Gt(0)] = 1e-3
    """Learning rate at the top of the schedule for a step of base_batch samples; the script reads it as run.base_lr."""
    base_batch: Positive | None = None
    """Samples of a step that base_lr was tuned for; by default plan.global_batch. For steps of other sizes it follows by batch_rule."""
    warmup: Literal["constant", "linear", "exponential"] = "linear"
    """How the rate gets from warmup_begin to the top: it stays and then jumps, or climbs by equal differences, or by equal ratios."""
    warmup_samples: Annotated[int, Ge(0)] | None = None
    """Length of the warmup in samples; by default there is none."""
    warmup_epochs: Annotated[float, Gt(0)] | None = None
    """The same in epochs."""
    warmup_steps: Positive | None = None
    """The same in steps of base_batch samples."""
    warmup_begin: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Where the warmup begins, as a fraction of the top rate."""
    decay: Literal["cosine", "constant", "step", "polynomial", "inverse_sqrt", "wsd"] = "cosine"
    """What follows the warmup: half a cosine down; the top rate held; a fall at each of decay_at; a power of what is left; the square
    root of warmup over samples; or the top rate held until the last decay_fraction of the run, which falls (warmup-stable-decay)."""
    decay_at: tuple[float, ...] = ()
    """Where `step` falls, as fractions of the run."""
    decay_factor: Annotated[float, Gt(0), Lt(1)] = 0.1
    """What `step` multiplies the rate by at each fall."""
    decay_power: Annotated[float, Gt(0)] = 1.0
    """Power of `polynomial` and of the fall of `wsd`; 1 is a straight line."""
    decay_fraction: Annotated[float, Gt(0), Le(1)] = 0.1
    """Last part of the run, in which `wsd` falls."""
    decay_samples: Positive | None = None
    """Samples of the run after which the decay has ended; by default all of them."""
    final_fraction: Annotated[float, Ge(0), Le(1)] = 0.1
    """Where `cosine`, `polynomial` and `wsd` end, as a fraction of the top rate."""
    batch_rule: RuleName = "linear"
    """How the learning rate follows from base_batch to the batch of the run, and to that of an elastic one (plan.batch). What each rule
    changes, and for which optimizers it holds, is in docs/learning_rate.md."""
    rewarm_samples: Annotated[int, Ge(0)] = 0
    """Samples over which it climbs where an elastic batch has grown; it falls at once."""

    def __post_init__(self) -> None:
        lengths = [key for key in LENGTHS if getattr(self, key) is not None]
        if len(lengths) > 1:
            raise ValueError(f"{lengths[1]} and {lengths[0]} both give the length of the warmup: leave out one of them")
        has_warmup = any(getattr(self, key) for key in LENGTHS)
        if has_warmup and self.warmup != "linear" and not self.warmup_begin:
            raise ValueError(
                f"warmup is {self.warmup}, which does not leave the 0 that warmup_begin is: give a fraction, "
                "such as base_batch over plan.global_batch"
            )
        if self.warmup_begin and not has_warmup:
            raise ValueError(f"warmup_begin is {self.warmup_begin:g}, and there is no warmup: give warmup_epochs")
        if self.decay == "inverse_sqrt" and not has_warmup:
            raise ValueError("decay is inverse_sqrt, which counts in warmups, and there is none: give warmup_epochs")
        if self.decay == "step" and not self.decay_at:
            raise ValueError(
                "decay_at is missing, which says where decay: step falls: give fractions, such as [0.5, 0.75]"
            )
        if any(later <= earlier for earlier, later in pairwise((0.0, *self.decay_at, 1.0))):
            raise ValueError(f"decay_at is {list(self.decay_at)}: give ascending fractions of the run, between 0 and 1")
        for key, (default, owners) in _OWNERS.items():
            if getattr(self, key) != default and self.decay not in owners:
                raise ValueError(
                    f"{key} is given, which decay: {self.decay} does not have: leave it out, or give decay: {owners[0]}"
                )

    def follows_batch(self, plan: PlanSpec) -> bool:
        """Whether steps may have other sizes than base_lr is for."""
        return plan.batch == "elastic" or self.base_batch not in (None, plan.global_batch)

    def is_measured(self, plan: PlanSpec) -> bool:
        """Whether the learning rate needs the gradient noise scale."""
        return self.follows_batch(plan) and RULES[self.batch_rule].is_measured

    def base_of(self, plan: PlanSpec) -> int:
        """Samples of a base batch."""
        return self.base_batch or plan.global_batch

    def scaled(self, plan: PlanSpec) -> Scaled:
        """What the rule changes for steps of one global batch, before anything is measured."""
        return RULES[self.batch_rule].scaled(plan.global_batch / self.base_of(plan), None)

    def over(self, plan: Plan) -> "Schedule":
        """The schedule of a run."""
        warmup = (
            (self.warmup_samples or 0)
            + (self.warmup_epochs or 0) * plan.samples_per_epoch
            + (self.warmup_steps or 0) * self.base_of(plan.spec)
        )
        return Schedule(self, warmup * self.scaled(plan.spec).warmup, self.decay_samples or plan.total_samples)


_OWNERS = {
    "decay_at": ((), ("step",)),
    "decay_factor": (0.1, ("step",)),
    "decay_power": (1.0, ("polynomial", "wsd")),
    "decay_fraction": (0.1, ("wsd",)),
}
"""Keys that some decays alone have: default, decays."""


@dataclass(frozen=True)
class Schedule:
    """A ScheduleSpec with its lengths in samples."""

    spec: ScheduleSpec
    warmup_samples: float
    total_samples: float

    def multiplier(self, samples: float) -> float:
        """Factor on the learning rate of the step that brings the run to `samples` samples, in [0, 1]."""
        return self._warmup(samples / self.warmup_samples) if samples < self.warmup_samples else self._decay(samples)

    def _warmup(self, done: float) -> float:
        """Goyal et al. 2017's constant and gradual ones (arXiv:1706.02677, section 2.2), and a geometric one."""
        begin = self.spec.warmup_begin
        if self.spec.warmup == "constant":
            return begin
        if self.spec.warmup == "linear":
            return begin + (1 - begin) * done
        return float(begin ** (1 - done))

    def _decay(self, samples: float) -> float:
        """After the warmup.

        The cosine is Loshchilov & Hutter 2017's (arXiv:1608.03983), without restarts; the inverse square root Vaswani et al. 2017's
        (arXiv:1706.03762); warmup-stable-decay Hu et al. 2024's (arXiv:2404.06395), with a polynomial fall.
        """
        spec = self.spec
        if spec.decay == "step":
            return float(spec.decay_factor ** sum(samples >= place * self.total_samples for place in spec.decay_at))
        if spec.decay == "inverse_sqrt":
            return sqrt(self.warmup_samples / samples)
        begin = self.warmup_samples
        if spec.decay == "wsd":
            begin = max(begin, self.total_samples * (1 - spec.decay_fraction))
        if spec.decay == "constant" or samples <= begin or self.total_samples <= begin:
            return 1.0
        done = min((samples - begin) / (self.total_samples - begin), 1.0)
        left = (1 + cos(pi * done)) / 2 if spec.decay == "cosine" else (1 - done) ** spec.decay_power
        return spec.final_fraction + (1 - spec.final_fraction) * float(left)
