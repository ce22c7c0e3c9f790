"""Sums of sparse gradients over ranks, each of which may have other rows."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.parallel.collectives import as_bytes
from undula.parallel.layout import Layout


class SparseSums:
    """Sums the gradients of parameters of layers made with sparse=True over the ranks of a layout.

    Args:
        parameters: Parameters, the same on every rank.
        layout: Layout of the worker group.
        sent_as: Dtype in which gradients are sent; None for their own dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, sent_as: torch.dtype | None):
        self._parameters = parameters
        self._layout = layout
        self._sent_as = sent_as

    def finish(self) -> None:
        """Store the sums as the gradients of the parameters."""
        if not self._parameters:
            return
        # A layer that is also used in another way, such as an embedding tied to the output layer, has a dense gradient.
        own = [parameter.grad is not None and not parameter.grad.is_sparse for parameter in self._parameters]
        is_dense = torch.tensor(own, dtype=torch.int32, device="cpu")
        dist.all_reduce(is_dense, group=self._layout.control)
        for parameter, ranks in zip(self._parameters, is_dense.tolist(), strict=True):
            parameter.grad = self._dense_sum(parameter) if ranks else self._sparse_sum(parameter)

    def _dense_sum(self, parameter: nn.Parameter) -> Tensor:
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        summed = own.to(self._sent_as or own.dtype)
        dist.all_reduce(summed, group=self._layout.shards)
        return summed.to(own.dtype)

    def _sparse_sum(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum of a sparse gradient; None if it has no rows.

        The ranks exchange their rows and add them up themselves, because no backend sums sparse tensors of 16-bit floats, and NCCL none at
        all.
        """
        own = (torch.zeros_like(parameter).to_sparse(1) if parameter.grad is None else parameter.grad).coalesce()
        counts = torch.zeros(self._layout.num_cells, dtype=torch.int64, device=own.device)
        counts[self._layout.cell] = own._nnz()
        dist.all_reduce(counts, group=self._layout.shards)
        rows = counts.tolist()
        if not any(rows):
            return None
        indices = self._gathered_rows(own.indices().t(), rows)
        values = self._gathered_rows(own.values().to(self._sent_as or own.dtype), rows).to(own.dtype)
        return torch.sparse_coo_tensor(
            indices.t(), values, own.shape, device=own.device, check_invariants=False
        ).coalesce()

    def _gathered_rows(self, own: Tensor, rows: list[int]) -> Tensor:
        """Return the rows of all ranks in one tensor, given the number of rows of each rank."""
        padded = own.new_zeros(max(rows), *own.shape[1:])
        padded[: len(own)] = own
        gathered = [torch.empty_like(padded) for _ in rows]
        dist.all_gather([as_bytes(of_rank) for of_rank in gathered], as_bytes(padded), group=self._layout.shards)
        return torch.cat([of_rank[:count] for of_rank, count in zip(gathered, rows, strict=True)])
