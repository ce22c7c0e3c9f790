"""Duration of a step, from counted operations and bytes, rates of a device, and links between workers. Pure."""

from dataclasses import dataclass
from math import ceil

from undula.plan.memory import Division, PassCount, StateCount
from undula.plan.scaling import Link
from undula.plan.sharded_time import copied_bytes, exchange_s
from undula.plan.tree import BUCKET_BYTES, assign
from undula.plan.work import DeviceRates

BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in both passes, which has two products for each one of the forward pass."""


@dataclass(frozen=True)
class StepSeconds:
    """Parts of a step's duration in seconds, on the worker that takes longest."""

    compute: float
    """Forward and backward passes."""
    communication: float
    """Exchange of gradients, and of the parameters of a sharded model, as far as no pass hides it."""
    update: float
    """Sums of the gradients of virtual workers, and the optimizer's step."""
    data: float = 0.0
    """Waiting for samples."""

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.update + self.data


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
    longest_range = max(map(len, assign(virtual_workers, ranks)))
    longest = longest_range * division.micro_batches
    each = rates.seconds(passes.work)
    read = longest * passes.samples / samples_per_s
    data = max(read - longest * each, 0.0)
    if division.stage:
        exchange = exchange_s(state, passes, division, rates, link, BACKWARD_SHARE)
        moved = copied_bytes(state, passes, division) + state.of_rank(division.world_size).update_moved_bytes
        return StepSeconds(longest * each, exchange, moved / rates.bytes_per_s, data)
    wire = state.gradient_bytes * division.wire
    exchange = link.exchange_s(wire, virtual_workers, ranks)
    # All buckets but the last one, which is sent only after the backward pass, travel while the last backward pass computes.
    hidden = each * BACKWARD_SHARE * (1 - 1 / max(ceil(wire / BUCKET_BYTES), 1))
    update = (summed_bytes(state.gradient_bytes, longest_range) + state.update_moved_bytes) / rates.bytes_per_s
    return StepSeconds(longest * each, max(exchange - hidden, 0.0), update, data)


def summed_bytes(gradient_bytes: float, virtual_workers: int) -> float:
    """Return what a rank reads and writes to add up the gradients of its virtual workers along the tree, and for the norm and the clipping.

    Every other gradient is copied, each sum reads two and writes one, the norm reads the sum, and clipping reads and writes it.
    """
    copied, added = (virtual_workers + 1) // 2 * (virtual_workers > 1), virtual_workers - 1
    return gradient_bytes * (2 * copied + 3 * added + 3)
