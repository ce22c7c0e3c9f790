"""Sums of gradients that a rank holds in the passes of a step of a sharded model. Pure.

The sums are those of `undula.parallel.reduce.unit_sum`: in stage 1, whole gradients of the subtrees of a rank; in stages 2 and 3, slices of
the gradients of all virtual workers whose turn has come.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from undula.plan.tree import Fold, assign, roots


@dataclass(frozen=True)
class PassSums:
    """Sums of gradients that a rank holds in a pass, each in relation to the padded gradient of a unit."""

    before: float
    """Sums that are held until the backward pass of the unit has ended."""
    after: float
    """Sums that are held afterwards."""
    taken: float = 0.0
    """Most that is held beside these while the gradient of a unit is taken, without the gradient itself."""
    waiting: float = 0.0
    """Sums that are held in the forward pass beside those of `before`."""
    keeps_flat: bool = False
    """Whether the gradient of the unit is part of `after`, without a copy."""


@dataclass(frozen=True)
class ShardedPass:
    """A pass of a step, as far as it decides what a rank holds."""

    sums: PassSums
    is_first: bool
    """Whether it is the first pass of a step."""
    is_last: bool


def own_virtual_workers(virtual_workers: int, ranks: int, rank: int, stage: int) -> range:
    """Return the virtual workers of a rank."""
    if stage >= 2:
        return range(rank, virtual_workers, ranks)
    return assign(virtual_workers, ranks)[rank]


@lru_cache(maxsize=1024)
def passes_of_step(
    virtual_workers: int, ranks: int, rank: int, stage: int, micro_batches: int
) -> tuple[ShardedPass, ...]:
    """Return the passes of a step that differ in what a rank holds.

    Args:
        virtual_workers: Number of virtual workers of the plan.
        ranks: Number of ranks.
        rank: The rank.
        stage: Stage of sharding, from 1 to 3.
        micro_batches: Number of micro-batches of a virtual worker.
    """
    make = _slices if stage >= 2 and ranks > 1 else _whole
    return tuple(dict.fromkeys(make(virtual_workers, ranks, rank, stage, micro_batches)))


def _whole(virtual_workers: int, ranks: int, rank: int, stage: int, micro_batches: int) -> Iterator[ShardedPass]:
    own = own_virtual_workers(virtual_workers, ranks, rank, stage)
    fold, before = Fold[bool](virtual_workers, lambda left, right: left), 0
    for place, virtual_worker in enumerate(own):
        waiting, before = before + (place > 0) - len(fold.roots), len(fold.roots)
        for number in range(micro_batches):
            is_new = number == 0
            yield ShardedPass(
                PassSums(
                    before=before + (not is_new),
                    after=before + 1,
                    # A rank that is alone divides the gradient by 1, and copies it.
                    taken=float(ranks == 1),
                    waiting=waiting if is_new else 0,
                    keeps_flat=is_new and ranks > 1,
                ),
                is_first=place == 0 and is_new,
                is_last=place == len(own) - 1 and number == micro_batches - 1,
            )
        fold.push(virtual_worker, True)


def _slices(virtual_workers: int, ranks: int, rank: int, stage: int, micro_batches: int) -> Iterator[ShardedPass]:
    fold = Fold[bool](virtual_workers, lambda left, right: left)
    turns = -(-virtual_workers // ranks)
    for turn in range(turns):
        leaves = range(turn * ranks, min((turn + 1) * ranks, virtual_workers))
        before, most = len(fold.roots), 0
        for virtual_worker in leaves:
            most = max(most, len(fold.roots) + 1)
            fold.push(virtual_worker, True)
        received, slices, after = len(leaves) / ranks, before / ranks, len(fold.roots) / ranks
        for number in range(micro_batches):
            is_new, ends = number == 0, number == micro_batches - 1
            leaf = float(not is_new)
            # The slices of all ranks are received, stacked and then copied one by one.
            taken = received + max(received, most / ranks - slices - leaf) if ends else 0.0
            sums = PassSums(
                slices + leaf,
                after if ends else slices + 1,
                taken,
                keeps_flat=is_new and not ends,
            )
            yield ShardedPass(sums, is_first=turn == 0 and is_new, is_last=turn == turns - 1 and ends)


def reduction(units: tuple[int, ...], virtual_workers: int, ranks: int, rank: int, stage: int) -> float:
    """Return the most bytes that a rank holds while the sums of a step are finished, one unit after another.

    Args:
        units: Padded gradients of the units in bytes.
        virtual_workers: Number of virtual workers of the plan.
        ranks: Number of ranks.
        rank: The rank.
        stage: Stage of sharding, from 1 to 3.
    """
    if stage >= 2 and ranks > 1:
        return (sum(units) + max(units, default=0)) / ranks
    counts = [len(roots(virtual_workers, each.start, each.stop)) for each in assign(virtual_workers, ranks)]
    own, most, left, done = counts[rank], 0.0, float(sum(units)), 0.0
    for size in units:
        sent = own * size if own > 1 and ranks > 1 else 0
        received = sum(counts) * size / ranks if ranks > 1 else 0
        most = max(most, own * left + done + sent + received + 2 * size / ranks)
        left, done = left - size, done + size / ranks
    return most


def gradient_messages(virtual_workers: int, ranks: int, rank: int, stage: int) -> int:
    """Return the number of whole gradients of which a rank sends each other rank its slice in a step."""
    own = own_virtual_workers(virtual_workers, ranks, rank, stage)
    if ranks == 1:
        return 0
    return len(own) if stage >= 2 else len(roots(virtual_workers, own.start, own.stop))
