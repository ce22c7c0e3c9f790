"""The torch engine: DistributedDataParallel, with gradients summed over ranks as the loop has already weighted them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from undula.run.clock import Mark, mark_on


class TorchEngine:
    """Places and wraps a model, and reduces its gradients in the backward pass of a step's last micro-batch.

    Each micro-batch's loss comes in weighted by its samples over the step's, so the plain sum over micro-batches and ranks is the
    mean over the step, for any assignment. A world of one runs the bare module.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.gradients_ready: Mark | None = None
        """When the last gradients of the step were computed here, and only the reduction was left."""

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
        """Call before the forward pass: DDP decides there whether the backward pass will reduce."""
        self.gradients_ready = None
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = is_last

    def _sum(self, state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.gradients_ready = mark_on(self.device)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module."""
    return model.module if isinstance(model, DistributedDataParallel) else model
