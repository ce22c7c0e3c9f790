"""Memory that a rank needs on its device, from counted quantities. Pure.

What the quantities are is counted elsewhere, on the model, the batches and the optimizer of a script. Here they are put together to the
moments of a step, of which the one that takes most decides whether a job fits.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

from undula.plan.plan import PlanSpec
from undula.plan.tree import BUCKET_BYTES, Fold, assign, roots
from undula.plan.work import Work


@dataclass(frozen=True)
class SplitTensor:
    """Parameter of a unit, which is split along its first dimension."""

    rows: int
    row_bytes: int
    trains: bool
    state_row_bytes: int = 0
    """State of the optimizer that is split like the parameter, for each row."""

    def rows_of_rank(self, ranks: int) -> int:
        """Return the rows of the first rank, which has most."""
        return -(-self.rows // ranks)


@dataclass(frozen=True)
class UnitCount:
    """Parameters that are gathered at once."""

    tensors: tuple[SplitTensor, ...]

    def shard_bytes(self, ranks: int) -> int:
        """Return the bytes of the parameters of a rank, which are padded to equal shards."""
        return sum(each.rows_of_rank(ranks) * each.row_bytes for each in self.tensors)

    def gradient_shard_bytes(self, ranks: int) -> int:
        """Return the bytes of a rank's slice of the unit's gradient."""
        return sum(each.rows_of_rank(ranks) * each.row_bytes for each in self.tensors if each.trains)

    def state_bytes(self, ranks: int) -> int:
        """Return the bytes of the optimizer's state that is split, on the first rank."""
        return sum(each.rows_of_rank(ranks) * each.state_row_bytes for each in self.tensors)


@dataclass(frozen=True)
class StateCount:
    """Memory of what a rank holds of a model and its optimizer between two steps, in bytes unless said otherwise."""

    parameters: int
    """Number of parameters."""
    trainable: int
    """Number of parameters that train."""
    parameter_bytes: int
    buffer_bytes: int
    other_bytes: int
    """What the script holds beside these, such as averages of the weights."""
    gradient_bytes: int
    largest_bytes: int
    """Largest gradient of a parameter."""
    optimizer_bytes: int
    """State of the optimizer."""
    update_bytes: int
    """Peak of an update, beside all of these."""
    update_moved_bytes: int
    """What an update reads and writes."""
    snapshot_bytes: int = 0
    """What a snapshot copies: tensors of the model, the optimizer and the run, each under all of its names."""
    units: tuple[UnitCount, ...] = ()
    """Parameters by unit, if the model is to be sharded: first those outside of units, which are one more unit."""

    @property
    def bucket_bytes(self) -> int:
        """Size of the largest bucket of gradients."""
        return min(self.gradient_bytes, max(BUCKET_BYTES, self.largest_bytes))

    @property
    def split_bytes(self) -> int:
        """Part of a snapshot of all ranks together of which each rank has a part if the model is sharded: all but the buffers."""
        return max(self.snapshot_bytes - self.buffer_bytes, 0)

    def of_rank(self, ranks: int) -> "StateCount":
        """Return what the first of some ranks holds if the model is sharded over them. Other ranks hold as much or a little less."""
        own, whole = _SplitBytes.of(self.units, ranks), _SplitBytes.of(self.units, 1)
        share = own.gradients / whole.gradients if whole.gradients else 1.0
        return replace(
            self,
            parameter_bytes=own.parameters,
            optimizer_bytes=self.optimizer_bytes - whole.state + own.state,
            gradient_bytes=own.gradients,
            largest_bytes=math.ceil(self.largest_bytes / ranks),
            update_bytes=math.ceil(self.update_bytes * share),
            update_moved_bytes=math.ceil(self.update_moved_bytes * share),
        )


@dataclass(frozen=True)
class _SplitBytes:
    """Bytes of what is split over the ranks, on the first rank."""

    parameters: int
    gradients: int
    state: int

    @classmethod
    def of(cls, units: Sequence[UnitCount], ranks: int) -> "_SplitBytes":
        return cls(
            sum(unit.shard_bytes(ranks) for unit in units),
            sum(unit.gradient_shard_bytes(ranks) for unit in units),
            sum(unit.state_bytes(ranks) for unit in units),
        )


@dataclass(frozen=True)
class PassCount:
    """Memory and computation of the forward and the backward pass of a micro-batch, in bytes unless said otherwise."""

    samples: int
    batch_bytes: int
    saved_bytes: int
    """What the forward pass leaves for the backward pass."""
    forward_bytes: int
    """Peak of the forward pass."""
    first_bytes: int
    """Peak of the backward pass of a virtual worker's first micro-batch, including its gradient, which did not exist before."""
    later_bytes: int
    """Peak of the backward pass of a later micro-batch, beside the gradient."""
    work: Work
    """What both passes compute."""
    gathered_share: float = 1.0
    """Bytes of a gathered parameter, relative to its own."""


def extrapolated(one: PassCount, other: PassCount, samples: int) -> PassCount:
    """Return the count of a micro-batch with another number of samples, on a line through two counts."""
    share = (samples - one.samples) / (other.samples - one.samples)
    values = {
        field.name: max(round(before + share * (after - before)), 0)
        for field in fields(PassCount)
        if field.name not in ("work", "gathered_share")
        for before, after in [(getattr(one, field.name), getattr(other, field.name))]
    }
    work = one.work * (1 - share) + other.work * share
    work = Work(*(max(term, 0.0) for term in work.terms))
    return PassCount(**values, work=work, gathered_share=one.gathered_share)


@dataclass(frozen=True)
class Parts:
    """Memory of a rank at a moment of a step, in bytes."""

    parameters: float = 0.0
    buffers: float = 0.0
    others: float = 0.0
    """What the script holds beside its model, such as averages of the weights."""
    optimizer: float = 0.0
    gathered: float = 0.0
    """Parameters of the units of a sharded model that are gathered."""
    gradients: float = 0.0
    """Gradients of virtual workers, their sums along the tree, and what is received from other ranks."""
    batch: float = 0.0
    activations: float = 0.0
    """What the forward pass leaves for the backward pass."""
    temporary: float = 0.0
    """What operations need beside the activations, and what an update needs beside the state."""
    context: float = 0.0
    """What the libraries of the device need."""

    @property
    def total(self) -> float:
        return math.fsum(asdict(self).values())


@dataclass(frozen=True)
class HeldGradients:
    """Gradients that a rank holds, each as large as that of the model."""

    kept: float
    """Memory that the sums of the rank's subtrees and those of other ranks keep between steps."""
    open: tuple[int, ...]
    """Number of sums of subtrees that wait for their siblings while each virtual worker of the rank computes."""


@dataclass(frozen=True)
class Division:
    """Division of a step among the ranks."""

    virtual_workers: int
    micro_batches: int
    """Number of micro-batches of each virtual worker."""
    world_size: int
    wire: float = 1.0
    """Bytes of a number in the sums of gradients, relative to those of a number in a gradient."""
    stage: int = 0
    """Stage of sharding; 0 if each rank has the whole model."""


def division_of(plan: PlanSpec, samples: int, workers: int, wire: float = 1.0, stage: int = 0) -> Division:
    """Return the division of a plan's step among some workers, with micro-batches of so many samples."""
    share = plan.global_batch // plan.virtual_workers
    return Division(plan.virtual_workers, -(-share // samples), workers, wire, stage)


@lru_cache(maxsize=1024)
def held_gradients(virtual_workers: int, world_size: int, rank: int, is_rounded: bool = False) -> HeldGradients:
    """Return the gradients that a rank holds beside that of the virtual worker that computes.

    A single virtual worker has nothing to add up, but if sums are rounded, its gradient is rounded as well.
    """
    if virtual_workers == 1 and not is_rounded:
        return HeldGradients(0.0, (0,))
    ranges = assign(virtual_workers, world_size)
    counts = [len(roots(virtual_workers, each.start, each.stop)) for each in ranges]
    others = sum(counts) - counts[rank]
    received = float(others) if counts == [1, 1] else others / world_size
    own = ranges[rank]
    first_leaves = {begin for begin, _ in roots(virtual_workers, own.start, own.stop)}
    fold = Fold[bool](virtual_workers, lambda left, right: left)
    held = []
    for virtual_worker in own:
        held.append(sum(fold.roots.values()))
        fold.push(virtual_worker, virtual_worker not in first_leaves)
    return HeldGradients(counts[rank] + received, tuple(held))


def moments_of_whole(
    rank: int, state: StateCount, passes: PassCount, division: Division
) -> Iterator[tuple[str, Parts]]:
    """Yield the moments of a rank's step with their memory, without that of the batch."""
    held = held_gradients(division.virtual_workers, division.world_size, rank, division.wire < 1)
    states = Parts(state.parameter_bytes, state.buffer_bytes, state.other_bytes, state.optimizer_bytes)

    def at(sums: float, leaves: int, activations: float, peak: float) -> Parts:
        """Return the memory with so many sums and gradients, and with a peak that includes the activations."""
        gradients = (sums * division.wire + leaves) * state.gradient_bytes
        return replace(states, gradients=gradients, activations=activations, temporary=max(peak - activations, 0.0))

    saved = passes.saved_bytes
    for place, waiting in enumerate(held.open):
        # The gradient of the former virtual worker is added to the others only when the next backward pass begins.
        former = held.open[place - 1] if place else 0
        yield "forward pass", at(held.kept + former, min(place, 1), saved, passes.forward_bytes)
        if waiting > former:
            # A leaf to which others will be added is copied, one bucket after another.
            yield "backward pass", at(held.kept + former, 1, saved, saved + state.bucket_bytes)
        first = at(held.kept + waiting, 0, saved, passes.first_bytes)
        grown = min(state.gradient_bytes, first.temporary)
        yield "backward pass", replace(first, gradients=first.gradients + grown, temporary=first.temporary - grown)
        if division.micro_batches > 1:
            yield "forward pass", at(held.kept + waiting, 1, saved, passes.forward_bytes)
            yield "backward pass", at(held.kept + waiting, 1, saved, passes.later_bytes)
    yield "reduction", at(held.kept, 1, 0, state.bucket_bytes if held.kept else 0)
    yield "update", at(held.kept, 1, 0, state.update_bytes)
