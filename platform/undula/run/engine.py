"""Engines: what places a model and sums its gradients, which the loop has already weighted, over virtual workers and ranks."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from undula.run.clock import Mark, mark_on
from undula.run.exact import ExactSum


class Engine(Protocol):
    """Sums gradients over the micro-batches and ranks of a step."""

    gradients_ready: Mark | None
    """When the last gradients of the step were computed here, and only the reduction was left; None where that does not overlap."""
    rounds_must_match: bool
    """Whether each rank must run the model equally often, as that takes all of them."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """Place a module, with rank 0's weights on every rank."""
        ...

    def before_micro_batch(self, model: nn.Module, is_last: bool) -> None:
        """Called before the forward pass."""
        ...

    def after_micro_batch(self, samples: int) -> None:
        """Called after the backward pass of a micro-batch of so many samples; of none where a rank has no share of a short step."""
        ...

    def end_step(self) -> None:
        """Leave the step's gradient in the parameters."""
        ...


class TorchEngine:
    """Places and wraps a model, and reduces its gradients in the backward pass of a step's last micro-batch.

    Each micro-batch's loss comes in weighted by its samples over the step's, so the plain sum over micro-batches and ranks is the
    mean over the step, for any assignment. A world of one runs the bare module.
    """

    rounds_must_match = False

    def __init__(self, device: torch.device):
        self.device = device
        self.gradients_ready: Mark | None = None

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

    def after_micro_batch(self, samples: int) -> None:
        """Autograd has added the gradients up, and DDP's hooks have reduced them."""

    def end_step(self) -> None:
        """All is done."""

    def _sum(self, state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.gradients_ready = mark_on(self.device)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


class ShardedEngine:
    """For a module that the script has sharded with torch's `fully_shard`, which gathers parameters and reduces gradients itself."""

    rounds_must_match = True

    def __init__(self) -> None:
        self.gradients_ready: Mark | None = None

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module as it is: its weights are those of the run's seed on every rank."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # the losses are weighted, so that gradients add up
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
        return module

    def before_micro_batch(self, model: nn.Module, is_last: bool) -> None:
        """Gradients add up here until the last micro-batch."""
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(is_last)

    def after_micro_batch(self, samples: int) -> None:
        """Autograd has added the gradients up."""

    def end_step(self) -> None:
        """They were reduced in the backward pass."""


class ExactEngine:
    """Sums gradients in integers, so that no order of virtual workers and ranks changes a bit of them.

    A micro-batch's gradients are added and forgotten; the sums of a step are reduced at its end, with 16 bytes a parameter where
    DistributedDataParallel sends 4, and not beside the backward pass. A world of one does the same arithmetic.
    """

    rounds_must_match = False

    def __init__(self, device: torch.device):
        self.device = device
        self.gradients_ready: Mark | None = None
        self._parameters: list[nn.Parameter] = []

    def wrap(self, module: nn.Module) -> nn.Module:
        module = module.to(self.device)
        if dist.get_world_size() > 1:
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._sums = ExactSum(self._parameters)
        return module

    def before_micro_batch(self, model: nn.Module, is_last: bool) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def after_micro_batch(self, samples: int) -> None:
        if samples:
            for place, parameter in enumerate(self._parameters):
                if parameter.grad is not None:
                    self._sums.add(place, parameter.grad)

    def end_step(self) -> None:
        self._sums.all_reduce()
        for parameter, value in zip(self._parameters, self._sums.values(), strict=True):
            parameter.grad = None if value is None else value.to(parameter.dtype)
        self._sums.clear()


def engine_for(module: nn.Module, device: torch.device, deterministic: bool) -> Engine:
    """What can train a module.

    Raises:
        RuntimeError: nothing can.
    """
    if not is_sharded(module):
        return ExactEngine(device) if deterministic else TorchEngine(device)
    if deterministic:
        raise RuntimeError(
            "deterministic: true sums whole gradients, and this model is sharded: leave out one of the two"
        )
    if not isinstance(module, FSDPModule):
        raise RuntimeError("run.model() got a module of which only parts are sharded: call fully_shard() on it as well")
    return ShardedEngine()


def is_sharded(module: nn.Module) -> bool:
    """Whether each rank has only a part of its parameters."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module."""
    return model.module if isinstance(model, DistributedDataParallel) else model
