"""Sums of sparse gradients along the tree over the virtual workers, each of which may have other rows."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.parallel.collectives import all_rows
from undula.parallel.layout import Layout
from undula.plan.tree import Fold, combined

Sum = Tensor | None
"""Sum of gradients, which is sparse or dense; None if there are none."""


class SparseSums:
    """Sums the gradients of parameters of layers made with sparse=True.

    A layer that is also used in another way, such as an embedding tied to the output layer, has dense gradients.

    Args:
        parameters: Parameters, the same on every rank.
        layout: Layout of the worker group.
        virtual_workers: Number of virtual workers of the plan.
        sent_as: Dtype to which each sum is rounded; None for their own dtype.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: Layout, virtual_workers: int, sent_as: torch.dtype | None
    ):
        self._parameters = parameters
        self._layout = layout
        self._all = (0, virtual_workers)
        self._roots = layout.roots(virtual_workers)
        self._sent_as = sent_as

    def begin_step(self) -> None:
        self._folds = [Fold[Sum](self._all[1], self._add) for _ in self._parameters]

    def close_leaves(self, virtual_workers: range, has_gradient: int | None) -> None:
        """Take over the gradients from the parameters.

        Args:
            virtual_workers: Virtual workers whose leaves are closed.
            has_gradient: The one of them that has samples, if any.
        """
        for parameter, fold in zip(self._parameters, self._folds, strict=True):
            for virtual_worker in virtual_workers:
                leaf = parameter.grad if virtual_worker == has_gradient else None
                fold.push(virtual_worker, None if leaf is None else self._rounded(leaf))
            parameter.grad = None

    def finish(self) -> None:
        """Store the sums as the gradients of the parameters."""
        if not self._parameters:
            return
        own = [any(_is_dense(root) for root in fold.roots.values()) for fold in self._folds]
        is_dense = torch.tensor(own, dtype=torch.int32, device="cpu")
        if self._layout.num_cells > 1:
            dist.all_reduce(is_dense, group=self._layout.control)
        for parameter, fold, ranks in zip(self._parameters, self._folds, is_dense.tolist(), strict=True):
            known = list(fold.roots.values())
            if self._layout.num_cells > 1:
                known = self._all_dense(parameter, known) if ranks else self._all_sparse(parameter, known)
            nodes = [node for of_rank in self._roots for node in of_rank]
            total = combined(self._all, dict(zip(nodes, known, strict=True)), self._add)
            if total is None or (total.is_sparse and not total._nnz()):
                parameter.grad = None
            else:
                parameter.grad = _mapped(total, lambda values: values + 0.0)

    def _add(self, left: Sum, right: Sum) -> Sum:
        if left is None or right is None:
            return right if left is None else left
        if _is_dense(left) or _is_dense(right):
            return self._rounded(left.to_dense() + right.to_dense())
        return self._rounded(left + right)

    def _rounded(self, gradient: Tensor) -> Tensor:
        """Return a gradient whose rows are in order and occur once, rounded to the dtype in which it is sent."""
        return _mapped(gradient, lambda values: values.to(self._sent_as or values.dtype).to(values.dtype))

    def _all_dense(self, parameter: nn.Parameter, own: Sequence[Sum]) -> list[Sum]:
        """Return the roots of all ranks, given those of this one, as dense tensors."""
        rows = torch.stack([torch.zeros_like(parameter) if root is None else root.to_dense() for root in own])
        gathered = all_rows(
            self._layout.shards, rows.to(self._sent_as or rows.dtype), [len(of_rank) for of_rank in self._roots]
        )
        return [*gathered.to(rows.dtype)]

    def _all_sparse(self, parameter: nn.Parameter, own: Sequence[Sum]) -> list[Sum]:
        """Return the roots of all ranks, given those of this one.

        The ranks exchange their rows and add them up themselves, because no backend sums sparse tensors of 16-bit floats, and NCCL none at
        all.
        """
        counts = list(map(len, self._roots))
        empty = torch.zeros_like(parameter).to_sparse(1)
        stacked = torch.stack([empty if root is None else root for root in own]).coalesce()
        rows = torch.zeros(len(counts), dtype=torch.int64, device=parameter.device)
        rows[self._layout.cell] = stacked._nnz()
        dist.all_reduce(rows, group=self._layout.shards)
        if not rows.any():
            return [None] * sum(counts)
        places, values = stacked.indices().t().clone(), stacked.values()
        places[:, 0] += sum(counts[: self._layout.cell])  # number of the root among those of all ranks
        places = all_rows(self._layout.shards, places, rows.tolist())
        sent = all_rows(self._layout.shards, values.to(self._sent_as or values.dtype), rows.tolist())
        shape = (sum(counts), *parameter.shape)
        return [*_sparse(places.t(), sent.to(values.dtype), shape)]


def _is_dense(gradient: Sum) -> bool:
    return gradient is not None and not gradient.is_sparse


def _mapped(gradient: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a gradient with other values, with its rows in order and without duplicates."""
    if not gradient.is_sparse:
        return function(gradient)
    gradient = gradient.coalesce()
    return _sparse(gradient.indices(), function(gradient.values()), gradient.shape)


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a sparse tensor of rows that are in order and occur once."""
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=True, check_invariants=False, device=values.device
    )
