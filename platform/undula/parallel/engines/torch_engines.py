"""Engines: what places a model and sums its gradients, which the loop has already weighted, over virtual workers and ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from undula.parallel.collectives import AllReduce, broadcast_from_rank_0, sum_over_ranks
from undula.parallel.device_clock import Mark, mark_on
from undula.parallel.reduce.exact import ExactSum
from undula.plan.plan import MicroBatch
from undula.state.pieces import is_sharded_tensor


class Engine:
    """Sums gradients over the micro-batches and ranks of a step; this one does so for a rank that is alone."""

    rounds_must_match = False
    """Whether each rank must run the model equally often, as that takes all of them."""
    gradients_ready: Mark | None = None
    """When the last gradients of the step were computed here, and only the reduction was left; None where that does not overlap."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """Place a module, with rank 0's weights on every rank."""
        return module

    def begin_step(self, micro_batches: int) -> None:
        """Called before the first of so many micro-batches."""

    def before_micro_batch(self, model: nn.Module, is_last: bool) -> None:
        """Called before the forward pass."""

    def after_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Called after the backward pass; of no samples where a rank has no share of a short step."""

    def end_step(self, samples: int) -> None:
        """Leave the gradient of a step of so many samples in the parameters."""


class TorchEngine(Engine):
    """Places and wraps a model, and reduces its gradients in the backward pass of a step's last micro-batch.

    Each micro-batch's loss comes in weighted by its samples over the step's, so the plain sum over micro-batches and ranks is the
    mean over the step, for any assignment. A world of one runs the bare module.

    Args:
        device: of this rank.
        sent_as: type in which gradients go over the network; None for their own.
    """

    def __init__(self, device: torch.device, sent_as: torch.dtype | None = None):
        self.device = device
        self._sent_as = sent_as

    def wrap(self, module: nn.Module) -> nn.Module:
        module = module.to(self.device)
        if dist.get_world_size() == 1:
            return module
        wrapped = DistributedDataParallel(
            module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            broadcast_buffers=False,  # BufferMean keeps them equal
            gradient_as_bucket_view=True,
        )
        wrapped.register_comm_hook(None, self._sum)
        return wrapped

    def before_micro_batch(self, model: nn.Module, is_last: bool) -> None:
        """DDP decides in the forward pass whether the backward pass will reduce."""
        self.gradients_ready = None
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = is_last

    def _sum(self, state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.gradients_ready = mark_on(self.device)
        gradients = bucket.buffer()
        work = dist.all_reduce(gradients.to(self._sent_as or gradients.dtype), async_op=True)
        assert work is not None

        def received(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            (summed,) = future.value()
            return summed if summed.dtype == gradients.dtype else gradients.copy_(summed)

        return work.get_future().then(received)  # type: ignore[no-any-return]


class ExactEngine(Engine):
    """Sums gradients in integers, so that no order of virtual workers and ranks changes a bit of them.

    A micro-batch's gradients are added and forgotten; the sums of a step are reduced at its end, with 16 bytes a parameter where
    DistributedDataParallel sends 4, and not beside the backward pass. A world of one does the same arithmetic.
    """

    def __init__(self, device: torch.device, all_reduce: AllReduce = sum_over_ranks):
        self.device = device
        self._all_reduce = all_reduce
        self._parameters: list[nn.Parameter] = []

    def wrap(self, module: nn.Module) -> nn.Module:
        module = module.to(self.device)
        broadcast_from_rank_0(module)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._sums = ExactSum(self._parameters)
        return module

    def before_micro_batch(self, model: nn.Module, is_last: bool) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def after_micro_batch(self, micro_batch: MicroBatch) -> None:
        if micro_batch.samples:
            for place, parameter in enumerate(self._parameters):
                if parameter.grad is not None:
                    self._sums.add(place, parameter.grad)

    def end_step(self, samples: int) -> None:
        self._sums.all_reduce(self._all_reduce)
        for parameter, value in zip(self._parameters, self._sums.values(), strict=True):
            parameter.grad = None if value is None else value.to(parameter.dtype)
        self._sums.clear()


def is_sharded(module: nn.Module) -> bool:
    """Whether each rank has only a part of its parameters."""
    return any(is_sharded_tensor(parameter) for parameter in module.parameters())


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module."""
    return model.module if isinstance(model, DistributedDataParallel) else model
