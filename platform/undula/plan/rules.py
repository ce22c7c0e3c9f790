"""How the learning rate follows a batch that has grown or shrunk: rules, and the way from one factor to the next. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

RuleName = Literal["none", "linear", "sqrt"]


def none(kappa: float) -> float:
    """The learning rate stays."""
    return 1.0


def linear(kappa: float) -> float:
    """In proportion to the batch: Goyal et al. 2017, arXiv:1706.02677, section 2.1. For SGD.

    Their momentum correction (remark 3, equation 10) is for updates that have the learning rate in the momentum buffer. Torch's SGD
    keeps gradients alone there and multiplies by the present rate, as their equation 9 does, which needs none.
    """
    return kappa


def square_root(kappa: float) -> float:
    """With the square root of the batch, which keeps the variance of an update: Krizhevsky 2014, arXiv:1404.5997, section 5."""
    return sqrt(kappa)


RULES: Mapping[RuleName, Callable[[float], float]] = {"none": none, "linear": linear, "sqrt": square_root}
"""Batch over the plan's global batch -> factor on the learning rate."""


@dataclass(frozen=True)
class LrFactor:
    """A factor on the learning rate on its way from one value to another."""

    begin: float
    end: float
    since: int = 0
    """Samples of the run when it set out."""

    def at(self, samples: int, rewarm_samples: int) -> float:
        """The factor of the step that brings the run to `samples`: in a straight line up over `rewarm_samples`, and down at once."""
        if self.end <= self.begin or samples >= self.since + rewarm_samples:
            return self.end
        return self.begin + (self.end - self.begin) * (samples - self.since) / rewarm_samples

    def towards(self, end: float, samples: int, rewarm_samples: int) -> "LrFactor":
        """Set out for another value, from where it is after `samples`; the same where it is on its way there."""
        return self if end == self.end else LrFactor(self.at(samples, rewarm_samples), end, samples)

    def values(self) -> dict[str, Any]:
        """For a checkpoint; `LrFactor(**values)` is the way back."""
        return {"begin": self.begin, "end": self.end, "since": self.since}
