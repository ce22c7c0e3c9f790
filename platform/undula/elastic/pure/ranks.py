"""Numbers of the ranks of a group, chosen so that as little as possible of a sharded state has to move. Pure."""

from collections.abc import Sequence

Place = tuple[int, int]
"""Rank in a group, and number of ranks of the group. Of each tensor, the rank holds about this part in their order."""


def order_by_state(places: Sequence[Place | None]) -> list[int]:
    """Return the worker of each rank of a new group.

    Workers that hold a part of the state keep their order, as parts of a tensor have one. Among all choices of ranks for them, the one is
    taken in which they already have the most of what they need. New workers get the other ranks, in their order.

    Args:
        places: Former place of each worker; None for one that holds nothing.
    """
    size = len(places)
    holders = sorted(
        (number for number, place in enumerate(places) if place),
        key=lambda number: ((places[number] or (0, 1))[0] / (places[number] or (0, 1))[1], number),
    )
    # kept[h][r]: the most that the first h holders can keep if they have ranks below r
    kept = [[0.0] * (size + 1) for _ in range(len(holders) + 1)]
    for count, holder in enumerate(holders, 1):
        for rank in range(size + 1):
            skips = kept[count][rank - 1] if rank > count else float("-inf")
            takes = (
                kept[count - 1][rank - 1] + common(places[holder], (rank - 1, size)) if rank >= count else float("-inf")
            )
            kept[count][rank] = max(skips, takes)
    ranks: dict[int, int] = {}
    rank = size
    for count in range(len(holders), 0, -1):
        while rank > count and kept[count][rank] == kept[count][rank - 1]:
            rank -= 1
        rank -= 1
        ranks[rank] = holders[count - 1]
    others = iter(number for number, place in enumerate(places) if not place)
    return [ranks[rank] if rank in ranks else next(others) for rank in range(size)]


def common(one: Place | None, other: Place) -> float:
    """Return which part of a tensor two places have in common; 0 if one of them is None."""
    if one is None:
        return 0.0
    (rank, ranks), (other_rank, other_ranks) = one, other
    units = min((rank + 1) * other_ranks, (other_rank + 1) * ranks) - max(rank * other_ranks, other_rank * ranks)
    return max(units, 0) / (ranks * other_ranks)
