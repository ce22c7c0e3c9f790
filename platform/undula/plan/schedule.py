"""Learning-rate schedules, clocked in samples so that they mean the same at any batch size."""

from math import cos, pi
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.plan.plan import STRICT
from undula.plan.rules import RuleName


@checked_dataclass(frozen=True, config=STRICT)
class ScheduleSpec:
    """How the learning rate moves over the run."""

    base_lr: Annotated[float, Gt(0)] = 1e-3
    """Learning rate at the top of the schedule; the script reads it as run.base_lr."""
    warmup_samples: Annotated[int, Ge(0)] = 0
    """Samples over which the rate climbs linearly from 0."""
    decay: Literal["cosine", "constant"] = "cosine"
    """What follows the warmup: half a cosine down to the end of the run, or the top rate held."""
    final_fraction: Annotated[float, Ge(0), Le(1)] = 0.1
    """Where the cosine ends, as a fraction of the top rate."""
    batch_rule: RuleName = "linear"
    """How the learning rate follows an elastic batch (plan.batch): not at all, in proportion, or with the square root."""
    rewarm_samples: Annotated[int, Ge(0)] = 0
    """Samples over which it climbs where an elastic batch has grown; it falls at once."""

    def multiplier(self, samples: int, total_samples: int) -> float:
        """Factor on the learning rate of the step that brings the run to `samples` samples, in [0, 1].

        Warmup is Goyal et al. 2017's gradual one; the cosine is Loshchilov & Hutter 2017's, without restarts.
        """
        if samples < self.warmup_samples:
            return samples / self.warmup_samples
        if self.decay == "constant" or total_samples <= self.warmup_samples:
            return 1.0
        done = min((samples - self.warmup_samples) / (total_samples - self.warmup_samples), 1.0)
        return self.final_fraction + (1 - self.final_fraction) * (1 + cos(pi * done)) / 2
