"""Sum of small tensors along the tree over the virtual workers."""

import torch
from torch import Tensor

from undula.parallel.collectives import all_rows
from undula.parallel.layout import Layout
from undula.plan.tree import Fold, combined


class TreeSum:
    """Sum over the micro-batches of a step, with the same bits at any number of ranks.

    Args:
        layout: Layout of the worker group; None for a process without one.
        virtual_workers: Number of virtual workers of the plan.
    """

    def __init__(self, layout: Layout | None, virtual_workers: int):
        self._layout = layout
        self._all = (0, virtual_workers)
        self._own = layout.virtual_workers(virtual_workers) if layout else range(virtual_workers)
        self._roots = layout.roots(virtual_workers) if layout else [(self._all,)]
        self.begin_step()

    def begin_step(self) -> None:
        self._fold = Fold[Tensor | None](self._all[1], added)
        self._open = self._own.start
        self._leaf: Tensor | None = None

    def add(self, virtual_worker: int, term: Tensor) -> None:
        """Add a term of a micro-batch. A rank adds those of one virtual worker after those of another."""
        self._close_until(virtual_worker)
        self._leaf = added(self._leaf, term)

    def total(self, like: Tensor) -> Tensor:
        """Return the sum. All ranks must call this together.

        Args:
            like: Tensor that has the shape, dtype and device of the sum.
        """
        self._close_until(self._own.stop)
        own = torch.stack([torch.zeros_like(like) if root is None else root for root in self._fold.roots.values()])
        every = all_rows(self._layout.shards, own, list(map(len, self._roots))) if self._layout else own
        nodes = (node for of_rank in self._roots for node in of_rank)
        total: Tensor = combined(self._all, dict(zip(nodes, every, strict=True)), torch.add)
        return total + 0.0

    def _close_until(self, virtual_worker: int) -> None:
        for closed in range(self._open, virtual_worker):
            self._fold.push(closed, self._leaf)
            self._leaf = None
        self._open = virtual_worker


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of two tensors, of which None counts as zero."""
    if one is None or other is None:
        return other if one is None else one
    return one + other
