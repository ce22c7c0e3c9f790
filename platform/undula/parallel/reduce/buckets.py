"""Sums of gradients over ranks in buckets, which are sent while the backward pass of a step's last micro-batch is still running.

The scheme is that of torch's DistributedDataParallel (Li et al. 2020, arXiv:2006.15704, section 3.2): buckets take the parameters in
reverse order, so that they fill in about the order in which gradients are computed. Unlike in DistributedDataParallel, a parameter
without a gradient costs nothing: each bucket also counts the ranks that have a gradient of each parameter, and a gradient that no rank
has stays None.

A backward pass can add to a gradient several times, as when activation checkpointing with use_reentrant=True runs a layer twice. It is then
not known when a bucket is complete. The first step therefore sends all buckets after its backward pass, and so do later steps if a
gradient was added to several times.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.device_clock import mark_on
from undula.parallel.layout import Layout
from undula.parallel.parameters import sparse_parameters
from undula.parallel.reduce.accumulator import Accumulator
from undula.parallel.reduce.division import Bucket, divide
from undula.parallel.reduce.sparse import SparseSums
from undula.plan.plan import MicroBatch
from undula.state.pieces import as_real


class BucketAccumulator(Accumulator):
    """Accumulator that sums the gradients over the ranks, dense ones in buckets and sparse ones after the backward pass.

    The buckets keep their memory between steps. During a step, each dense gradient is a view of its bucket.

    Args:
        module: Module on its device.
        layout: Layout of the worker group.
        sent_as: Dtype in which gradients are sent; None for their own dtype.
    """

    def __init__(self, module: nn.Module, layout: Layout, sent_as: torch.dtype | None = None):
        super().__init__(module)
        self._group = layout.shards
        self._sent_as = sent_as
        sparse = sparse_parameters(module)
        self._sparse = SparseSums([parameter for parameter in self.parameters if parameter in sparse], layout, sent_as)
        self._buckets = divide([parameter for parameter in self.parameters if parameter not in sparse])
        self._place = {
            parameter: (bucket, index) for bucket in self._buckets for index, parameter in enumerate(bucket.parameters)
        }
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for parameter in self._place
        ]
        self._is_last = False
        self._overlaps = False
        """Whether a backward pass sends buckets; False in the first step."""
        self._repeats = False
        """Whether a backward pass has added to a gradient several times."""

    def close(self) -> None:
        """Remove the hooks from the parameters.

        Parameters and hooks refer to each other through torch's C++ objects, where the garbage collector does not find such a cycle. With
        the hooks in place, neither the parameters nor the buckets would ever be freed.
        """
        for hook in self._hooks:
            hook.remove()

    def open(self, micro_batches: int) -> None:
        self._is_last, self.num_begun, self.ready = False, 0, None
        for bucket in self._buckets:
            bucket.ready = set()

    def before_backward(self, micro_batch: MicroBatch, is_last: bool) -> None:
        """From the second step on, the last backward pass sends buckets as soon as they are complete."""
        self._is_last = is_last

    def finish(self, samples: int) -> None:
        """Send the remaining buckets, wait for all sums, and store the sums as the gradients of the parameters."""
        for bucket in self._buckets[self.num_begun :]:
            self._send(bucket)
        self._is_last, self._overlaps = False, not self._repeats
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            if bucket.sent is not None:
                as_real(bucket.flat).copy_(bucket.sent)
            bucket.work = bucket.sent = None
            absent = [place for place, parameter in enumerate(bucket.parameters) if parameter.grad is None]
            # Reading the counts waits for the device, so only a rank that lacks gradients checks whether other ranks have them.
            counts = bucket.counts.abs().tolist() if absent else []
            for place in absent:
                if counts[place]:
                    bucket.parameters[place].grad = bucket.views[place]
        self._sparse.finish()

    def _accumulated(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        bucket, index = self._place[parameter]
        view = bucket.views[index]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        if not self._is_last:
            return
        if index in bucket.ready:
            self._repeats, self._overlaps = True, False
            if bucket.work is not None:
                raise UsageError(
                    "a backward pass added to a gradient again after it had been sent, which did not happen in the first step; "
                    "if the model uses activation checkpointing, set use_reentrant=False"
                )
        bucket.ready.add(index)
        # All ranks send the buckets in the same order, because their collectives must match.
        while self._overlaps and self.num_begun < len(self._buckets) and self._buckets[self.num_begun].is_complete:
            self._send(self._buckets[self.num_begun])
            self.num_begun += 1
            self.ready = mark_on(view.device)

    def _send(self, bucket: Bucket) -> None:
        has = [parameter.grad is not None for parameter in bucket.parameters]
        for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:  # set by the script, not by a backward pass
                view.copy_(parameter.grad)
                parameter.grad = view
        if all(has):
            bucket.counts.fill_(1)
        else:
            bucket.counts.copy_(torch.tensor(has, device="cpu"))
        flat = as_real(bucket.flat)
        sent = flat if self._sent_as is None else flat.to(self._sent_as)
        bucket.sent = None if sent is flat else sent
        bucket.work = dist.all_reduce(sent, group=self._group, async_op=True)
