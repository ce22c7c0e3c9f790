"""The tree along which the gradients of a step's virtual workers are added up, and the virtual workers of each rank. Pure.

Floating-point addition is not associative, so a sum has the same bits for any number of ranks only if its order does not depend on them.
The order here is a binary tree over the virtual workers. A rank adds up what it can along the tree: its contiguous range of virtual workers
consists of a few largest subtrees, whose sums are the *roots* of the rank. The ranks exchange their roots, and each adds these up along the
rest of the tree.

Also here: sizes of what training keeps, which whoever reckons its memory needs as well.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Generic, TypeVar

BUCKET_BYTES = 25 * 2**20
"""Maximum size of a bucket of gradients of several parameters."""
UPDATES = 4
"""Number of updates that workers of a sharded model keep beside their snapshots, if the job does not set how often these are taken."""


T = TypeVar("T")
Node = tuple[int, int]
"""Subtree: its first virtual worker, and the one after its last."""


def halves(node: Node) -> tuple[Node, Node]:
    """Split a node into its two subtrees. The length of the first is the largest power of two below the length of the node."""
    begin, end = node
    middle = begin + 2 ** ((end - begin - 1).bit_length() - 1)
    return (begin, middle), (middle, end)


@lru_cache(maxsize=2**16)
def roots(virtual_workers: int, begin: int, end: int) -> tuple[Node, ...]:
    """Return the largest subtrees within a range of virtual workers, in order, given the number of all virtual workers."""

    def within(node: Node) -> tuple[Node, ...]:
        if begin <= node[0] and node[1] <= end:
            return (node,)
        if end <= node[0] or node[1] <= begin:
            return ()
        return tuple(root for half in halves(node) for root in within(half))

    return within((0, virtual_workers)) if begin < end else ()


def combined(node: Node, known: Mapping[Node, T], combine: Callable[[T, T], T]) -> T:
    """Combine the values of some subtrees along the tree into that of `node`, which they must cover."""
    if node in known:
        return known[node]
    left, right = (combined(half, known, combine) for half in halves(node))
    return combine(left, right)


class Fold(Generic[T]):
    """Sums along the tree, of leaves that come one after another. It holds the values of the largest subtrees that are complete.

    Args:
        virtual_workers: Number of all virtual workers.
        combine: Function that combines the values of two siblings, of which it may overwrite the first.
    """

    def __init__(self, virtual_workers: int, combine: Callable[[T, T], T]):
        self._combine = combine
        self._parents = _parents(virtual_workers)
        self.roots: dict[Node, T] = {}
        """Values of the subtrees, in order."""

    def push(self, virtual_worker: int, leaf: T) -> None:
        """Add the leaf of the virtual worker that follows the last one."""
        node, value = (virtual_worker, virtual_worker + 1), leaf
        while (parent := self._parents.get(node)) and (sibling := (parent[0], node[0])) in self.roots:
            node, value = parent, self._combine(self.roots.pop(sibling), value)
        self.roots[node] = value


@lru_cache(maxsize=64)
def _parents(virtual_workers: int) -> Mapping[Node, Node]:
    """Return the parent of each node that has one."""
    found: dict[Node, Node] = {}
    nodes = [(0, virtual_workers)]
    while nodes:
        node = nodes.pop()
        if node[1] - node[0] > 1:
            found |= dict.fromkeys(halves(node), node)
            nodes += halves(node)
    return found


@lru_cache(maxsize=1024)
def assign(virtual_workers: int, world_size: int) -> tuple[range, ...]:
    """Assign virtual workers to ranks in contiguous ranges. Nothing else relates the number of virtual workers to the world size.

    The longest range, which decides how long a step takes, is as short as possible. Among such assignments, the one that is chosen has the
    fewest roots, which decide how many bytes are sent, and then the fewest roots on any rank. Each rank has a virtual worker if there are
    enough.
    """
    if world_size >= virtual_workers:
        cuts = [rank * virtual_workers // world_size for rank in range(world_size + 1)]
    else:
        cuts = _fewest_roots(virtual_workers, world_size)
    return tuple(map(range, cuts, cuts[1:]))


def _fewest_roots(virtual_workers: int, world_size: int) -> list[int]:
    """Return the bounds of the ranges, by dynamic programming over the end of each rank's range."""
    longest = -(-virtual_workers // world_size)
    best: dict[int, tuple[tuple[int, int, int], list[int]]] = {0: ((0, 0, 0), [0])}
    for later in reversed(range(world_size)):
        extended: dict[int, tuple[tuple[int, int, int], list[int]]] = {}
        for begin, ((total, most, squares), cuts) in best.items():
            first = max(begin + 1, virtual_workers - later * longest)
            for end in range(first, min(begin + longest, virtual_workers - later) + 1):
                count = len(roots(virtual_workers, begin, end))
                cost = (total + count, max(most, count), squares + (end - begin) ** 2)
                if end not in extended or cost < extended[end][0]:
                    extended[end] = (cost, [*cuts, end])
        best = extended
    return best[virtual_workers][1]
