"""What a device computes, and the rates at which it does so. Pure."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Work:
    """Operations of torch."""

    flops: float = 0
    """Floating-point operations of matrix products, convolutions and attention, two for each product and its sum."""
    moved_bytes: float = 0
    """What convolutions, and operations without products, read and write."""
    operations: float = 0
    """Number of operations that do not only make views."""
    convolutions: float = 0
    """Number of convolutions and of their backward passes among them."""
    kernel_bytes: float = 0
    """Weights that convolutions read, and gradients of weights that they write."""

    def __add__(self, other: "Work") -> "Work":
        return Work(*(mine + its for mine, its in zip(self.terms, other.terms, strict=True)))

    def __mul__(self, factor: float) -> "Work":
        return Work(*(factor * term for term in self.terms))

    @property
    def terms(self) -> tuple[float, float, float, float, float]:
        """The quantities, in the order of the fields."""
        return self.flops, self.moved_bytes, self.operations, self.convolutions, self.kernel_bytes


@dataclass(frozen=True)
class DeviceRates:
    """Rates that a device reaches in the steps of a model."""

    flops_per_s: float
    """Rate of matrix products, convolutions and attention."""
    bytes_per_s: float
    """Rate at which other operations read and write memory."""
    operation_s: float = 0.0
    """Seconds for which the host is busy with an operation."""
    convolution_s: float = 0.0
    """Further seconds of each convolution, beside those of its products."""
    kernel_byte_s: float = 0.0
    """Seconds for a byte of a convolution's weights, which libraries for CPUs bring into another order before each pass."""
    is_async: bool = True
    """Whether the device computes while the host is busy with the next operations, as a GPU does."""

    def seconds(self, work: Work) -> float:
        """Return the duration of some work."""
        busy = work.flops / self.flops_per_s + work.moved_bytes / self.bytes_per_s
        busy += work.convolutions * self.convolution_s + work.kernel_bytes * self.kernel_byte_s
        host = work.operations * self.operation_s
        return max(busy, host) if self.is_async else busy + host

    def mixed(self, other: "DeviceRates", share: float) -> "DeviceRates":
        """Return rates with which work takes as long as `share` of it with others and the rest with these."""

        def mean(mine: float, its: float) -> float:
            return (1 - share) * mine + share * its

        def rate(mine: float, its: float) -> float:
            second = mean(1 / mine, 1 / its)
            return 1 / second if second else inf

        return DeviceRates(
            rate(self.flops_per_s, other.flops_per_s),
            rate(self.bytes_per_s, other.bytes_per_s),
            mean(self.operation_s, other.operation_s),
            mean(self.convolution_s, other.convolution_s),
            mean(self.kernel_byte_s, other.kernel_byte_s),
            self.is_async,
        )
