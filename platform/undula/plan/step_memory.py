"""Memory that a rank needs at each moment of a step, of whole and of sharded models, and what it sends in a step. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from undula.plan.memory import Division, Parts, PassCount, StateCount, moments_of_whole
from undula.plan.sharded_sums import ShardedPass, gradient_messages, own_virtual_workers, passes_of_step, reduction
from undula.plan.unit_pass import PassMoment, Replay, ReplayedPass


def moments(
    state: StateCount, passes: PassCount, division: Division, on_gpu: bool = True, context: float = 0.0
) -> dict[str, Parts]:
    """Return the memory of the rank that needs most, at each moment of a step that may take most.

    Args:
        state: What was counted of the states.
        passes: What was counted of a micro-batch.
        division: Division of the step among the ranks.
        on_gpu: Whether the device is a GPU, to which the next micro-batch is copied while the current one computes.
        context: Bytes that the libraries of the device need.
    """
    found: dict[str, Parts] = {}
    # In stages 2 and 3, the first rank has most virtual workers, and as large shards as any other.
    ranks = 1 if division.stage >= 2 else min(division.world_size, division.virtual_workers)
    for rank in range(ranks):
        make = _moments_of_sharded if division.stage else moments_of_whole
        for name, parts in make(rank, state, passes, division):
            parts = replace(parts, batch=passes.batch_bytes * (1 + on_gpu), context=context)
            if name not in found or parts.total > found[name].total:
                found[name] = parts
    return found


def peak(moments: Mapping[str, Parts]) -> Parts:
    """Return the memory at the moment that takes most."""
    return max(moments.values(), key=lambda parts: parts.total)


@lru_cache(maxsize=4096)
def _moments_of_sharded(
    rank: int, state: StateCount, passes: PassCount, division: Division
) -> tuple[tuple[str, Parts], ...]:
    return tuple(_each_moment(rank, state, passes, division))


def _each_moment(rank: int, state: StateCount, passes: PassCount, division: Division) -> Iterator[tuple[str, Parts]]:
    """Yield the moments of a rank's step with their memory, without that of the batch."""
    assert passes.marks, "the model was counted as one that is not sharded"
    ranks, own = division.world_size, state.of_rank(division.world_size)
    states = Parts(own.parameter_bytes, own.buffer_bytes, own.other_bytes, own.optimizer_bytes)

    def at(moment: PassMoment, saved: float) -> Parts:
        saved = min(saved, moment.pass_bytes)
        return replace(
            states,
            gathered=moment.gathered,
            gradients=moment.gradients,
            activations=saved,
            temporary=moment.pass_bytes - saved,
        )

    for each in _passes(rank, division):
        replayed = _replayed(state, passes, division, each)
        yield "forward pass", at(replayed.forward, passes.saved_bytes)
        yield "backward pass", at(replayed.backward, passes.saved_bytes)
    padded = tuple(ranks * unit.gradient_shard_bytes(ranks) for unit in state.units)
    sums = reduction(padded, division.virtual_workers, ranks, rank, division.stage)
    yield "reduction", replace(states, gradients=sums)
    yield "update", replace(states, gradients=own.gradient_bytes, temporary=own.update_bytes)


def _passes(rank: int, division: Division) -> tuple[ShardedPass, ...]:
    return passes_of_step(division.virtual_workers, division.world_size, rank, division.stage, division.micro_batches)


def _replayed(state: StateCount, passes: PassCount, division: Division, each: ShardedPass) -> ReplayedPass:
    share = passes.gathered_share
    replay = Replay(state.units, division.world_size, division.stage, each.sums, each.is_first, each.is_last, share)
    return replay.run(passes.marks)


@dataclass(frozen=True)
class SentBytes:
    """What a rank sends to others in a step of a sharded model, in bytes."""

    parameters: int
    """Its shards of the units that are gathered."""
    gradients: int
    gathers: int = 0
    """Number of times that a unit is gathered."""
    exchanges: int = 0
    """Number of times that slices of a unit's gradient are sent."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients


def sent_bytes(state: StateCount, passes: PassCount, division: Division, rank: int = 0) -> SentBytes:
    """Return what a rank sends to all others together in a step.

    Args:
        state: What was counted of the states.
        passes: What was counted of a micro-batch.
        division: Division of the step among the ranks. Its stage is not 0.
        rank: The rank.
    """
    virtual_workers, ranks, stage = division.virtual_workers, division.world_size, division.stage
    each_own = (own_virtual_workers(virtual_workers, ranks, each, stage) for each in range(ranks))
    rounds = max(map(len, each_own)) * division.micro_batches
    found = [
        (count, _replayed(state, passes, division, ShardedPass(_passes(rank, division)[0].sums, is_first, is_last)))
        for count, is_first, is_last in (
            [(1, True, True)] if rounds == 1 else [(1, True, False), (rounds - 2, False, False), (1, False, True)]
        )
    ]
    messages = gradient_messages(virtual_workers, ranks, rank, stage)
    shards = [unit.gradient_shard_bytes(ranks) for unit in state.units]
    return SentBytes(
        sum(count * each.sent_bytes for count, each in found),
        messages * (ranks - 1) * sum(shards),
        sum(count * each.gathers for count, each in found),
        messages * sum(1 for each in shards if each),
    )
