"""Sums of gradients along one tree over the virtual workers, so that their bits do not depend on the number of ranks.

Buckets are sent while the backward pass of a step's last micro-batch is still running. The scheme is that of torch's
DistributedDataParallel (Li et al. 2020, arXiv:2006.15704, section 3.2): buckets take the parameters in reverse order, so that they fill in
about the order in which gradients are computed. Unlike in DistributedDataParallel, a parameter without a gradient costs nothing: each
bucket also says which parameters have a gradient, and a gradient that no virtual worker has stays None.

A backward pass can add to a gradient several times, as when activation checkpointing with use_reentrant=True runs a layer twice. It is then
not known when a bucket is complete. The first step therefore sends all buckets after its backward pass, and so do later steps if a
gradient was added to several times.

Also here: sum of tensors along the tree over the virtual workers, for what is not a gradient.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.device_clock import mark_on
from undula.parallel.layout import Layout
from undula.parallel.reduce.accumulator import Accumulator, sparse_parameters
from undula.parallel.reduce.bucket import Bucket, divide
from undula.parallel.reduce.exchange import Exchange, TorchExchange
from undula.parallel.reduce.sparse import SparseSums
from undula.plan.plan import MicroBatch
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


class TreeAccumulator(Accumulator):
    """Accumulator that adds up the gradients of virtual workers along the tree of `undula.plan.tree`.

    The gradient of a virtual worker accumulates in the parameters. When another virtual worker begins, it is added to the former ones, and
    the parameters have no gradient again.

    Args:
        module: Module on its device.
        layout: Layout of the worker group.
        virtual_workers: Number of virtual workers of the plan.
        make_exchange: Function that makes the exchange of the ranks' sums; None for a single rank.
        sent_as: Dtype to which each sum is rounded, and in which gradients are sent; None for their own dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        virtual_workers: int,
        make_exchange: Callable[[], Exchange] | None,
        sent_as: torch.dtype | None = None,
    ):
        super().__init__(module)
        self._own = layout.virtual_workers(virtual_workers)
        self._exchange = make_exchange() if make_exchange else None
        sparse = sparse_parameters(module)
        in_sparse = [parameter for parameter in self.parameters if parameter in sparse]
        self._sparse = SparseSums(in_sparse, layout, virtual_workers, sent_as)
        dense = [parameter for parameter in self.parameters if parameter not in sparse]
        roots = layout.roots(virtual_workers)[layout.cell]
        self._buckets = [Bucket(each, virtual_workers, roots, layout.num_cells, sent_as) for each in divide(dense)]
        self._place = {
            parameter: (bucket, index) for bucket in self._buckets for index, parameter in enumerate(bucket.parameters)
        }
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for parameter in self._place
        ]
        self._overlaps = False
        """Whether a backward pass sends buckets; False in the first step."""
        self._repeats = False
        """Whether a backward pass has added to a gradient several times."""
        self.open([])

    def close(self) -> None:
        """Remove the hooks from the parameters.

        Parameters and hooks refer to each other through torch's C++ objects, where the garbage collector does not find such a cycle. With
        the hooks in place, neither the parameters nor the buckets would ever be freed.
        """
        for hook in self._hooks:
            hook.remove()

    def open(self, work: Sequence[MicroBatch]) -> None:
        self.ready = None
        self._is_last = False
        self._virtual_worker: int | None = None
        """Virtual worker whose leaf is open."""
        self._num_closed = 0
        """Number of this rank's virtual workers whose leaves are closed."""
        self._num_sent = 0
        """Number of buckets that are sent."""
        for bucket in self._buckets:
            bucket.begin_step()
        self._sparse.begin_step()
        if self._exchange:
            self._exchange.begin_step()

    def before_backward(self, micro_batch: MicroBatch, is_last: bool) -> None:
        """From the second step on, the last backward pass closes and sends buckets as soon as they are complete."""
        self._is_last = is_last
        if micro_batch.samples and micro_batch.virtual_worker != self._virtual_worker:
            for bucket in self._buckets:
                self._close(bucket, micro_batch.virtual_worker)
            self._sparse.close_leaves(self._unclosed(micro_batch.virtual_worker), self._virtual_worker)
            self._num_closed = micro_batch.virtual_worker - self._own.start
            self._virtual_worker = micro_batch.virtual_worker

    def finish(self, samples: int) -> None:
        """Send the remaining buckets, wait for all sums, and store the sums as the gradients of the parameters."""
        for bucket in self._buckets[self._num_sent :]:
            self._send(bucket)
        self._sparse.close_leaves(self._unclosed(self._own.stop), self._virtual_worker)
        self._is_last, self._overlaps = False, self._exchange is not None and not self._repeats
        for place, bucket in enumerate(self._buckets):
            if self._exchange:
                self._exchange.finish(place)
            bucket.store(is_shared=self._exchange is not None)
        self._sparse.finish()

    def _accumulated(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if not self._is_last:
            return
        bucket, index = self._place[parameter]
        if index in bucket.ready:
            self._repeats, self._overlaps = True, False
            if bucket in self._buckets[: self._num_sent]:
                raise UsageError(
                    "a backward pass added to a gradient again after it had been sent, which did not happen in the first step; "
                    "if the model uses activation checkpointing, set use_reentrant=False"
                )
        bucket.ready.add(index)
        # All ranks send the buckets in the same order, because their messages must match.
        while self._overlaps and self._num_sent < len(self._buckets) and self._buckets[self._num_sent].is_complete:
            with self.collectives.counted():
                self._send(self._buckets[self._num_sent])
            self.ready = mark_on(parameter.device)

    def _send(self, bucket: Bucket) -> None:
        self._close(bucket, self._own.stop)
        if self._exchange:
            self._exchange.send(self._num_sent, bucket.roots())
        self._num_sent += 1

    def _close(self, bucket: Bucket, stop: int) -> None:
        """Close the leaves of a bucket up to that of virtual worker `stop`."""
        for virtual_worker in self._unclosed(stop):
            if virtual_worker == self._virtual_worker:
                bucket.close_leaf(virtual_worker, is_last=stop == self._own.stop)
            else:
                bucket.skip_leaf(virtual_worker)

    def _unclosed(self, stop: int) -> range:
        """Return the virtual workers of this rank before `stop` whose leaves are not closed."""
        return range(self._own.start + self._num_closed, stop)
