"""The gradient noise scale, from norms of gradients over batches of two sizes: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1."""

from dataclasses import dataclass
from math import inf, isfinite

DECAY = 0.99
"""Of the averages, by measurement: they are over about the last hundred."""


@dataclass(frozen=True)
class StepNorms:
    """What a step's gradients were."""

    small_squared: float
    """Mean over its micro-batches of the squared norms of their gradients, weighted by samples."""
    whole_squared: float
    """Squared norm of the gradient over all of its samples."""
    micro_batches: int
    samples: int

    def estimates(self) -> tuple[float, float] | None:
        """Unbiased estimates of tr(Sigma), the variance of one sample's gradient, and of |G|^2, the expected gradient's squared norm.

        Each may be negative. With micro-batches of b_i samples each, B together, E|g_i|^2 = |G|^2 + tr(Sigma) / b_i, so that their mean
        weighted by b_i / B is one over batches of B / n samples, even where they are not equally large. None where there is but one
        micro-batch, or a norm is not finite.
        """
        others = self.micro_batches - 1
        if others < 1 or not isfinite(self.small_squared + self.whole_squared):
            return None
        variance = self.samples * (self.small_squared - self.whole_squared) / others
        squared = (self.micro_batches * self.whole_squared - self.small_squared) / others
        return variance, squared


@dataclass(frozen=True)
class NoiseScale:
    """Exponential averages of both estimates, apart, as the mean of their ratios would be biased."""

    variance: float = 0.0
    squared: float = 0.0
    weight: float = 0.0
    """What the average of ones would be: the others, over this, are not biased towards their zero at the start."""

    def after(self, norms: StepNorms) -> "NoiseScale":
        """With one more step."""
        estimates = norms.estimates()
        if estimates is None:
            return self
        return NoiseScale(
            DECAY * self.variance + (1 - DECAY) * estimates[0],
            DECAY * self.squared + (1 - DECAY) * estimates[1],
            DECAY * self.weight + (1 - DECAY),
        )

    @property
    def samples(self) -> float | None:
        """tr(Sigma) / |G|^2, the batch in samples at which noise and signal are equal; None before it was measured.

        Infinite where no gradient stands out of the noise.
        """
        if not self.weight:
            return None
        if self.variance <= 0:
            return 0.0
        return self.variance / self.squared if self.squared > 0 else inf


@dataclass(frozen=True)
class Measured:
    """What a run has measured up to a step."""

    noise: NoiseScale = NoiseScale()
    clock: float = 0.0
    """Of a schedule whose steps count by their gain, in samples of the base batch."""

    def values(self) -> tuple[float, ...]:
        """For a checkpoint; `Measured.of(*values)` is the way back."""
        return (self.noise.variance, self.noise.squared, self.noise.weight, self.clock)

    @classmethod
    def of(cls, variance: float, squared: float, weight: float, clock: float) -> "Measured":
        return cls(NoiseScale(variance, squared, weight), clock)
