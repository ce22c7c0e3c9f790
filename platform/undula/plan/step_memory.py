"""Memory that a rank needs at each moment of a step, of whole and of sharded models, and what it sends in a step. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from undula.plan.memory import Division, Parts, PassCount, StateCount, moments_of_whole
from undula.plan.sharded_sums import gradient_messages, own_virtual_workers, passes_of_step, reduction


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
    """Yield the moments of a rank's step with their memory, without that of the batch.

    They follow from the passes of the whole model and from what torch's `fully_shard` gathers: in stage 3 the unit that computes, the next
    one, and the rest of the model; in the others, all units. Of what ranks really hold, the moment that takes most is at most 1 % less and
    8 % more, as `tests/unit/train/test_sharded_count.py` measures.
    """
    assert state.units, "the model was counted as one that is not sharded"
    ranks, own = division.world_size, state.of_rank(division.world_size)
    states = Parts(own.parameter_bytes, own.buffer_bytes, own.other_bytes, own.optimizer_bytes)
    rest, *units = (ranks * unit.shard_bytes(ranks) * passes.gathered_share for unit in state.units)
    rest_gradient, *gradients = padded = [ranks * unit.gradient_shard_bytes(ranks) for unit in state.units]
    largest, largest_gradient = max(units, default=0.0), max(gradients, default=0)
    saved_by_unit = passes.saved_bytes / max(len(units), 1)
    is_alone, whole = ranks == 1, rest + sum(units)

    def at(gathered: float, sums: float, saved: float, most: float) -> Parts:
        saved = min(saved, most)
        return replace(states, gathered=gathered, gradients=sums, activations=saved, temporary=most - saved)

    for each in passes_of_step(division.virtual_workers, ranks, rank, division.stage, division.micro_batches):
        sums, taken = each.sums, 1 + each.sums.taken
        now = rest + largest if division.stage == 3 else whole
        following = now + (largest if division.stage == 3 or (each.is_first and not is_alone) else 0.0)
        before = sums.before * sum(padded)
        waiting = before + sums.waiting * sum(padded)
        yield "forward pass", at(following, waiting, passes.saved_bytes, passes.forward_bytes)
        yield "backward pass", at(following, before, passes.saved_bytes, passes.later_bytes)
        # The gradient of a unit is taken once the unit is freed, with what the forward pass has left for it. In stage 1, the gradients of
        # units stay, and take the place of what is freed.
        left = max(passes.saved_bytes - saved_by_unit, 0.0)
        most = max(passes.later_bytes - saved_by_unit, 0.0)
        freed = largest if each.is_last and division.stage == 2 else 0.0
        yield "backward pass", at(now - freed, before + largest_gradient * taken, left, most)
        kept = rest if division.stage == 3 or each.is_last else whole
        after = sums.after * sum(padded) - sums.keeps_flat * rest_gradient
        # Torch takes a slice of each unit's gradient in vain.
        yield "backward pass", at(kept, after + sum(padded) / ranks + max(padded) * taken, 0.0, 0.0)
    sums_of_step = reduction(tuple(padded), division.virtual_workers, ranks, rank, division.stage)
    yield "reduction", replace(states, gradients=sums_of_step)
    yield "update", replace(states, gradients=own.gradient_bytes, temporary=own.update_bytes)


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
    # In stage 3, a unit is gathered for its forward and its backward pass, and the rest of the model for both.
    times = [(rounds if stage == 3 else 1) * (1 + (stage == 3 and place > 0)) for place in range(len(state.units))]
    sent = [int(unit.shard_bytes(ranks) * passes.gathered_share) * (ranks - 1) for unit in state.units]
    messages = gradient_messages(virtual_workers, ranks, rank, stage)
    shards = [unit.gradient_shard_bytes(ranks) for unit in state.units]
    return SentBytes(
        sum(count * each for count, each in zip(times, sent, strict=True)),
        messages * (ranks - 1) * sum(shards),
        sum(count for count, unit in zip(times, state.units, strict=True) if unit.tensors),
        messages * sum(1 for each in shards if each),
    )
