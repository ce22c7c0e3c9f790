"""Gradient noise scale, estimated from gradient norms at two batch sizes: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1."""

from dataclasses import dataclass
from math import inf, isfinite

DECAY = 0.99
"""Decay of the exponential averages per measurement. They cover roughly the last hundred measurements."""


@dataclass(frozen=True)
class StepNorms:
    """Gradient norms of a step."""

    small_squared: float
    """Mean of the squared gradient norms of the step's micro-batches, weighted by samples."""
    whole_squared: float
    """Squared norm of the gradient of the whole step."""
    micro_batches: int
    """Number of micro-batches in the step."""
    samples: int
    """Number of samples in the step."""

    def estimates(self) -> tuple[float, float] | None:
        """Estimate tr(Sigma), the variance of one sample's gradient, and |G|^2, the squared norm of the expected gradient.

        Both estimates are unbiased and can be negative. For n micro-batches of b_i samples, B samples in total,
        E|g_i|^2 = |G|^2 + tr(Sigma) / b_i. The mean weighted by b_i / B is therefore |G|^2 + tr(Sigma) / (B / n), also when the
        micro-batches differ in size.

        Returns:
            The estimates of tr(Sigma) and |G|^2, or None if the step has a single micro-batch or a norm is not finite.
        """
        others = self.micro_batches - 1
        if others < 1 or not isfinite(self.small_squared + self.whole_squared):
            return None
        variance = self.samples * (self.small_squared - self.whole_squared) / others
        squared = (self.micro_batches * self.whole_squared - self.small_squared) / others
        return variance, squared


@dataclass(frozen=True)
class NoiseScale:
    """Exponential averages of both estimates. They are averaged separately because the mean of their ratios would be biased."""

    variance: float = 0.0
    """Exponential average of the estimates of tr(Sigma)."""
    squared: float = 0.0
    """Exponential average of the estimates of |G|^2."""
    weight: float = 0.0
    """Exponential average of ones. Dividing the other averages by it corrects their bias towards the initial zero."""

    def after(self, norms: StepNorms) -> "NoiseScale":
        """Return the averages after one more step."""
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
        """Noise scale tr(Sigma) / |G|^2: the batch size in samples at which noise and signal are equal.

        It is None before the first measurement, and infinite if the gradient cannot be distinguished from the noise.
        """
        if not self.weight:
            return None
        if self.variance <= 0:
            return 0.0
        return self.variance / self.squared if self.squared > 0 else inf


@dataclass(frozen=True)
class Measured:
    """Measurements of a run up to a step."""

    noise: NoiseScale = NoiseScale()
    clock: float = 0.0
    """Position of the schedule in samples, for a rule whose steps advance the schedule by their gain (AdaScale)."""

    def values(self) -> tuple[float, ...]:
        """Return the numbers to save in a checkpoint; `Measured.of(*values)` restores them."""
        return (self.noise.variance, self.noise.squared, self.noise.weight, self.clock)

    @classmethod
    def of(cls, variance: float, squared: float, weight: float, clock: float) -> "Measured":
        """Restore measurements from the numbers that `values` returned."""
        return cls(NoiseScale(variance, squared, weight), clock)
