"""Learning-rate schedules. They advance by samples, so that their shape is the same at any batch size."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import cos, pi, sqrt
from operator import ge
from typing import Annotated, Literal, assert_never

from annotated_types import Ge, Gt, Le, Lt
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT
from undula.plan.plan import Plan, PlanSpec, Positive
from undula.plan.rules import RULES, RuleName, Scaled

Length = Literal["warmup_samples", "warmup_epochs", "warmup_steps"]
LENGTHS: tuple[Length, ...] = ("warmup_samples", "warmup_epochs", "warmup_steps")


@checked_dataclass(frozen=True, config=STRICT)
class ScheduleSpec:
    """Learning rate over the course of the run."""

    base_lr: Annotated[float, Gt(0)] = 1e-3
    """Peak learning rate for a step of base_batch samples; the script reads it as run.base_lr."""
    base_batch: Positive | None = None
    """Number of samples per step that base_lr was tuned for; by default plan.global_batch. For other batch sizes, the learning rate is
    scaled by batch_rule."""
    warmup: Literal["constant", "linear", "exponential"] = "linear"
    """Shape of the warmup from warmup_begin to the peak: `constant` holds the initial rate and then jumps, `linear` and `exponential` rise
    by equal differences and by equal ratios."""
    warmup_samples: Annotated[int, Ge(0)] | None = None
    """Length of the warmup in samples; by default there is no warmup."""
    warmup_epochs: Annotated[float, Gt(0)] | None = None
    """Length of the warmup in epochs."""
    warmup_steps: Positive | None = None
    """Length of the warmup in steps of base_batch samples."""
    warmup_begin: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Learning rate at the start of the warmup, as a fraction of the peak."""
    decay: Literal["cosine", "constant", "step", "polynomial", "inverse_sqrt", "wsd"] = "cosine"
    """Shape of the decay after the warmup: `cosine` is half a cosine; `constant` holds the peak; `step` drops at each of decay_at;
    `polynomial` is a power of the fraction that is left; `inverse_sqrt` is the square root of warmup over samples; `wsd`
    (warmup-stable-decay) holds the peak until the last decay_fraction of the run."""
    decay_at: tuple[float, ...] = ()
    """Points at which `step` drops, as fractions of the run."""
    decay_factor: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Factor by which `step` multiplies the learning rate at each drop."""
    decay_power: Annotated[float, Gt(0)] = 1.0
    """Exponent of `polynomial` and of the decay of `wsd`; 1 is a straight line."""
    decay_fraction: Annotated[float, Gt(0), Le(1)] = 0.1
    """Fraction of the run, at its end, over which `wsd` decays."""
    decay_samples: Positive | None = None
    """Number of samples after which the decay has ended; by default all samples of the run."""
    final_fraction: Annotated[float, Ge(0), Le(1)] = 0.1
    """Learning rate at the end of `cosine`, `polynomial` and `wsd`, as a fraction of the peak."""
    batch_rule: RuleName = "linear"
    """Rule that scales the learning rate from base_batch to the batch size of the run, and to each size of an elastic batch (plan.batch).
    docs/learning_rate.md describes what each rule changes and for which optimizers it holds."""
    rewarm_samples: Annotated[int, Ge(0)] = 0
    """Number of samples over which the learning rate rises after an elastic batch has grown; it falls at once when the batch shrinks."""

    def __post_init__(self) -> None:
        lengths = [key for key in LENGTHS if getattr(self, key) is not None]
        if len(lengths) > 1:
            raise ValueError(f"{lengths[1]} and {lengths[0]} both set the length of the warmup; remove one of them")
        has_warmup = self.has_warmup
        if has_warmup and self.warmup != "linear" and not self.warmup_begin:
            raise ValueError(
                f"warmup is {self.warmup}, which cannot start from a learning rate of 0; set warmup_begin to a fraction of the peak, "
                "such as base_batch / plan.global_batch"
            )
        if self.warmup_begin and not has_warmup:
            raise ValueError(
                f"warmup_begin is {self.warmup_begin:g}, but the schedule has no warmup; set warmup_epochs"
            )
        if self.decay == "inverse_sqrt" and not has_warmup:
            raise ValueError("decay is inverse_sqrt, which depends on the length of the warmup; set warmup_epochs")
        if self.decay == "step" and not self.decay_at:
            raise ValueError(
                "decay_at is missing, but decay=step needs it; set it to fractions of the run, such as [0.5, 0.75]"
            )
        if any(later <= earlier for earlier, later in pairwise((0.0, *self.decay_at, 1.0))):
            raise ValueError(
                f"decay_at is {list(self.decay_at)}; set it to ascending fractions of the run, each between 0 and 1"
            )
        for key, (default, owners) in _OWNERS.items():
            if getattr(self, key) != default and self.decay not in owners:
                raise ValueError(f"{key} has no effect with decay={self.decay}; remove it or set decay={owners[0]}")

    @property
    def has_warmup(self) -> bool:
        return any(getattr(self, key) for key in LENGTHS)

    def follows_batch(self, plan: PlanSpec) -> bool:
        """Return whether steps can have another batch size than the one that base_lr was tuned for."""
        return plan.batch == "elastic" or self.base_batch not in (None, plan.global_batch)

    def is_measured(self, plan: PlanSpec) -> bool:
        """Return whether the learning rate depends on the gradient noise scale."""
        return self.follows_batch(plan) and RULES[self.batch_rule].is_measured

    def base_of(self, plan: PlanSpec) -> int:
        """Return the number of samples in a base batch."""
        return self.base_batch or plan.global_batch

    def scaled(self, plan: PlanSpec) -> Scaled:
        """Return the changes by the rule to steps of one global batch, before the first measurement of the noise scale."""
        return RULES[self.batch_rule].scaled(plan.global_batch / self.base_of(plan), None)

    def over(self, plan: Plan) -> "Schedule":
        """Return the schedule of a run, with all lengths in samples."""
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
"""Keys that apply to some decays only: the key's default, and the decays that use it."""


@dataclass(frozen=True)
class Schedule:
    """A ScheduleSpec with its lengths in samples."""

    spec: ScheduleSpec
    warmup_samples: float
    total_samples: float

    def multiplier(self, samples: float) -> float:
        """Return the factor in [0, 1] on the learning rate of the step after which the run has consumed `samples` samples.

        A constant warmup ends, and a `step` drops, after the step that reaches the sample, not with it.
        """
        is_over = _is_after if self.spec.warmup == "constant" and self.warmup_samples else ge
        warms_up = not is_over(samples, self.warmup_samples)
        return self._warmup(samples / self.warmup_samples) if warms_up else self._decay(samples)

    def _warmup(self, done: float) -> float:
        """Return the factor during the warmup, given the fraction `done` of the warmup that is over.

        The constant and linear shapes are from Goyal et al. 2017 (arXiv:1706.02677, section 2.2).
        """
        begin = self.spec.warmup_begin
        match self.spec.warmup:
            case "constant":
                return begin
            case "linear":
                return begin + (1 - begin) * done
            case "exponential":
                return float(begin ** (1 - done))
            case _:
                assert_never(self.spec.warmup)

    def _decay(self, samples: float) -> float:
        """Return the factor after the warmup.

        The cosine is from Loshchilov & Hutter 2017 (arXiv:1608.03983), without restarts. The inverse square root is from Vaswani et al.
        2017 (arXiv:1706.03762). Warmup-stable-decay is from Hu et al. 2024 (arXiv:2404.06395), with a polynomial decay.
        """
        spec, begin = self.spec, self.warmup_samples
        match spec.decay:
            case "constant":
                return 1.0
            case "step":
                return float(
                    spec.decay_factor ** sum(_is_after(samples, place * self.total_samples) for place in spec.decay_at)
                )
            case "inverse_sqrt":
                return sqrt(self.warmup_samples / samples)
            case "cosine":
                return self._between(begin, samples, lambda done: (1 + cos(pi * done)) / 2)
            case "polynomial":
                return self._between(begin, samples, lambda done: (1 - done) ** spec.decay_power)
            case "wsd":
                begin = max(begin, self.total_samples * (1 - spec.decay_fraction))
                return self._between(begin, samples, lambda done: (1 - done) ** spec.decay_power)
            case _:
                assert_never(spec.decay)

    def _between(self, begin: float, samples: float, left: Callable[[float], float]) -> float:
        """Return the factor of a decay from 1 after `begin` samples to `final_fraction` at the end of the run.

        Args:
            begin: Number of samples after which the decay begins.
            samples: Number of samples that the run has consumed.
            left: Shape of the decay: it maps the fraction of the decay that is over to the fraction that is left, from 1 to 0.
        """
        if samples <= begin or self.total_samples <= begin:
            return 1.0
        done = min((samples - begin) / (self.total_samples - begin), 1.0)
        return self.spec.final_fraction + (1 - self.spec.final_fraction) * float(left(done))


def _is_after(samples: float, place: float) -> bool:
    """Return whether a number of samples is above a place, which may be off by a rounding error."""
    return samples > place * (1 + 1e-9)
