"""Deadlocks that the script has made: workers that wait for each other in different collectives. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

DEADLOCK_S = 15.0
"""Seconds for which all ranks must have waited in the same places before a deadlock is certain."""
NAMED_RANKS = 4
"""Maximum number of ranks that a message names."""
ENDED = ""
"""Operation of a rank on which the script has ended."""


@dataclass(frozen=True)
class CollectiveWait:
    """Collective in which the training thread of a rank waits for other ranks."""

    operation: str
    """Function of torch.distributed that waits; ENDED if the script has ended on the rank, which begins no more."""
    call: str
    """Function that the script has called, such as `full_tensor()`."""
    place: str
    """Line of the script, such as `train.py:12`; empty if the script is not on the stack."""
    begun: Mapping[str, int] = field(default_factory=dict)
    """Number of collectives that the rank has begun in each process group, by the name of the group, and of transfers from rank to rank."""


def deadlock(waits: Sequence[CollectiveWait | None]) -> str | None:
    """Return a sentence about a deadlock that cannot end by itself; None if there is none, or if a slow collective may still end.

    All ranks must wait or have ended. Two of them wait for each other if they are at the same collective of their groups with different
    operations, or if each has begun collectives of a group that the other one has not. One that has ended will not begin what it has not.

    Args:
        waits: Wait of each rank, which has lasted for DEADLOCK_S; None for a rank that does not wait in a collective.
    """
    known = [wait for wait in waits if wait]
    if len(known) < len(waits) or not any(_wait_for_each_other(*pair) for pair in combinations(known, 2)):
        return None
    ranks_at: dict[str, list[int]] = {}
    for rank, wait in enumerate(known):
        where = f"in {wait.call}{f' at {wait.place}' if wait.place else ''}"
        ranks_at.setdefault("at the end of the script" if wait.operation == ENDED else where, []).append(rank)
    places = [f"{_ranks(ranks)} {place}" for place, ranks in ranks_at.items()]
    return (
        f"the workers wait for each other in different collectives: {', '.join(places)}; all workers must begin the same collectives in "
        "the same order, so move the call out of code that only some of them run"
    )


def _wait_for_each_other(one: CollectiveWait, other: CollectiveWait) -> bool:
    groups = one.begun.keys() | other.begun.keys()
    ahead = {one.begun.get(group, 0) - other.begun.get(group, 0) for group in groups}
    if ENDED in (one.operation, other.operation):
        return one.operation != other.operation and (min(ahead) < 0 if one.operation == ENDED else max(ahead) > 0)
    if ahead == {0}:
        return one.operation != other.operation
    return min(ahead) < 0 < max(ahead)


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:NAMED_RANKS])) + (", ..." if len(ranks) > NAMED_RANKS else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
