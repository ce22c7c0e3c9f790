"""Duration of a step, from counted operations and bytes, rates of a device, and links between workers. Pure."""

from dataclasses import dataclass
from math import ceil

from undula.plan.memory import BUCKET_BYTES, Division, PassCount, StateCount
from undula.plan.scaling import Link
from undula.plan.tree import assign

BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in both passes, which has two products for each one of the forward pass."""


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
    is_async: bool = True
    """Whether the device computes while the host is busy with the next operations, as a GPU does."""


@dataclass(frozen=True)
class StepSeconds:
    """Parts of a step's duration in seconds, on the worker that takes longest."""

    compute: float
    """Forward and backward passes."""
    communication: float
    """Exchange of gradients, as far as no backward pass hides it."""
    update: float
    data: float = 0.0
    """Waiting for samples."""

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.update + self.data


def passes_s(passes: PassCount, rates: DeviceRates) -> float:
    """Return the duration of the forward and the backward pass of a micro-batch."""
    busy = passes.flops / rates.flops_per_s + passes.moved_bytes / rates.bytes_per_s
    busy += passes.convolutions * rates.convolution_s
    host = passes.operations * rates.operation_s
    return max(busy, host) if rates.is_async else busy + host


def step_seconds(
    state: StateCount,
    passes: PassCount,
    division: Division,
    rates: DeviceRates,
    link: Link,
    samples_per_s: float = float("inf"),
) -> StepSeconds:
    """Return the parts of a step.

    Args:
        state: What was counted of the states.
        passes: What was counted of a micro-batch.
        division: Division of the step among the ranks.
        rates: Rates of the device.
        link: Link between two workers.
        samples_per_s: Rate at which each worker reads samples.
    """
    virtual_workers, ranks = division.virtual_workers, min(division.world_size, division.virtual_workers)
    longest = max(map(len, assign(virtual_workers, ranks))) * division.micro_batches
    each = passes_s(passes, rates)
    wire = state.gradient_bytes * division.wire
    exchange = link.exchange_s(wire, virtual_workers, ranks)
    # All buckets but the last one, which is sent only after the backward pass, travel while the last backward pass computes.
    hidden = each * BACKWARD_SHARE * (1 - 1 / max(ceil(wire / BUCKET_BYTES), 1))
    update = state.update_moved_bytes / rates.bytes_per_s
    read = longest * passes.samples / samples_per_s
    return StepSeconds(longest * each, max(exchange - hidden, 0.0), update, max(read - longest * each, 0.0))
