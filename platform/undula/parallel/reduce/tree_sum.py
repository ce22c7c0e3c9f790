"""Sum of tensors along the tree over the virtual workers, for what is not a gradient."""

import torch
import torch.nn.functional as F
from torch import Tensor

from undula.parallel.layout import Layout
from undula.parallel.reduce.exchange import TorchExchange
from undula.plan.tree import Fold


class TreeSum:
    """Sum over the micro-batches of a step, with the same bits at any number of ranks.

    Args:
        layout: Layout of the worker group; None for a process without one.
        virtual_workers: Number of virtual workers of the plan.
    """

    def __init__(self, layout: Layout | None, virtual_workers: int):
        self._virtual_workers = virtual_workers
        self._own = layout.virtual_workers(virtual_workers) if layout else range(virtual_workers)
        self._num_slices = layout.num_cells if layout else 1
        self._exchange = TorchExchange(layout, virtual_workers) if layout and layout.num_cells > 1 else None
        self.begin_step()

    def begin_step(self) -> None:
        self._fold = Fold[Tensor | None](self._virtual_workers, added)
        self._open = list(self._own)
        """Virtual workers of this rank whose leaves are not closed."""
        self._leaf: Tensor | None = None

    def add(self, virtual_worker: int, term: Tensor) -> None:
        """Add a term of a micro-batch. A rank adds those of one virtual worker after those of another."""
        self._close_until(virtual_worker)
        self._leaf = added(self._leaf, term)

    def total(self, like: Tensor) -> Tensor:
        """Return the sum. All ranks must call this together.

        Args:
            like: Tensor that has the shape [elements], the dtype and the device of the sum.
        """
        self._close_until(self._virtual_workers)
        padding = -len(like) % self._num_slices
        roots = [
            F.pad(torch.zeros_like(like) if root is None else root, (0, padding)) for root in self._fold.roots.values()
        ]
        if self._exchange and len(like):
            self._exchange.begin_step()
            self._exchange.send(0, roots)
            self._exchange.finish(0)
        return roots[0][: len(like)] + 0.0

    def _close_until(self, virtual_worker: int) -> None:
        while self._open and self._open[0] < virtual_worker:
            self._fold.push(self._open.pop(0), self._leaf)
            self._leaf = None


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of two tensors, of which None counts as zero."""
    if one is None or other is None:
        return other if one is None else one
    return one + other
