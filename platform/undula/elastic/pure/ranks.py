"""Numbers of the ranks of a group, chosen so that as little as possible of a sharded state has to move. Pure."""

from collections.abc import Sequence

Place = tuple[int, int]
"""Rank in a group, and number of ranks of the group. Of each tensor, the rank holds about this part in their order."""


def order_by_state(places: Sequence[Place | None]) -> list[int]:
    """Return the worker of each rank of a new group.

    Among all choices, the one is taken in which workers already have the most of what they need. Workers that keep something keep their
    order as well, as the parts of a tensor have one. The others get the other ranks, in their order.

    Args:
        places: Former place of each worker; None for one that holds nothing.
    """
    size = len(places)
    holders = sorted((_begin(place), number) for number, place in enumerate(places) if place)
    # kept[h][r]: the most that the first h holders can keep in ranks below r
    kept = [[0.0] * (size + 1) for _ in range(len(holders) + 1)]
    for count, (_, holder) in enumerate(holders, 1):
        for rank in range(1, size + 1):
            takes = kept[count - 1][rank - 1] + common(places[holder], (rank - 1, size))
            kept[count][rank] = max(kept[count - 1][rank], kept[count][rank - 1], takes)
    ranks: dict[int, int] = {}
    count, rank = len(holders), size
    while count and rank:
        if kept[count][rank] == kept[count - 1][rank]:
            count -= 1
        elif kept[count][rank] == kept[count][rank - 1]:
            rank -= 1
        else:
            count, rank = count - 1, rank - 1
            ranks[rank] = holders[count][1]
    others = iter(sorted(set(range(size)) - set(ranks.values())))
    return [ranks[rank] if rank in ranks else next(others) for rank in range(size)]


def _begin(place: Place) -> float:
    return place[0] / place[1]


def common(one: Place | None, other: Place) -> float:
    """Return which part of a tensor two places have in common; 0 if one of them is None."""
    if one is None:
        return 0.0
    (rank, ranks), (other_rank, other_ranks) = one, other
    units = min((rank + 1) * other_ranks, (other_rank + 1) * ranks) - max(rank * other_ranks, other_rank * ranks)
    return max(units, 0) / (ranks * other_ranks)
