"""The default engine. Each rank has the whole model, and gradients are summed while the last backward pass is still running."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.parallel.capabilities import DATA_PARALLEL
from undula.parallel.collectives import sparse_sum
from undula.parallel.engines.engine import Engine, sparse_parameters
from undula.parallel.layout import Layout
from undula.parallel.reduce.buckets import GradientBuckets
from undula.plan.plan import MicroBatch


class DataParallelEngine(Engine):
    """Engine that sums gradients over ranks in buckets, during the backward pass of each step's last micro-batch.

    Args:
        layout: Layout of the worker group.
        sent_as: Dtype in which gradients are sent; None for their own dtype.
    """

    capabilities = DATA_PARALLEL

    def __init__(self, layout: Layout, sent_as: torch.dtype | None = None):
        super().__init__(layout)
        self._sent_as = sent_as
        self._buckets: GradientBuckets | None = None
        self._sparse: list[nn.Parameter] = []

    def lay_out(self) -> None:
        self._close_buckets()
        if self.layout.num_cells == 1:
            return
        sparse = sparse_parameters(self.module)
        self._sparse = [parameter for parameter in self.trainable if parameter in sparse]
        dense = [parameter for parameter in self.trainable if parameter not in sparse]
        self._buckets = GradientBuckets(dense, self.layout.shards, self._sent_as)

    def close(self) -> None:
        super().close()
        self._close_buckets()

    def _close_buckets(self) -> None:
        if self._buckets:
            self._buckets.close()
        self._buckets = None

    def backward(self, loss: Tensor, weight: float, micro_batch: MicroBatch, is_last: bool) -> None:
        if self._buckets and is_last:
            self._buckets.begin_last()
        super().backward(loss, weight, micro_batch, is_last)
        if self._buckets and is_last:
            self.gradients_ready = self._buckets.ready
            self.begun_in_backward = self._buckets.num_sent

    def reduce_gradients(self, samples: int) -> None:
        if self._buckets:
            self._buckets.finish()
        if self._sparse:
            # A layer that is also used in another way, such as an embedding tied to the output layer, has a dense gradient.
            found = [each.grad is not None and not each.grad.is_sparse for each in self._sparse]
            is_dense = torch.tensor(found, dtype=torch.int32, device="cpu")
            dist.all_reduce(is_dense, group=self.layout.control)
            for parameter, ranks in zip(self._sparse, is_dense.tolist(), strict=True):
                parameter.grad = self._dense_sum(parameter) if ranks else self._sparse_sum(parameter)

    def _dense_sum(self, parameter: nn.Parameter) -> Tensor:
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        summed = own.to(self._sent_as or own.dtype)
        dist.all_reduce(summed, group=self.layout.shards)
        return summed.to(own.dtype)

    def _sparse_sum(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum of a sparse gradient over the ranks, each of which has different rows of it; None if it has no rows."""
        own = torch.zeros_like(parameter).to_sparse(1) if parameter.grad is None else parameter.grad
        summed = sparse_sum(own, self.layout.shards, self._sent_as)
        return summed if summed._nnz() else None
