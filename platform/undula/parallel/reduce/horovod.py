"""Reduction of jobs with `engine: horovod`. It is imported only for such a job, because nothing else needs Horovod."""

import time
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from undula.parallel.reduce.accumulator import Accumulator

POLL_INTERVAL_S = 0.0002
NEVER = 2**62


def sum_over_horovod(tensor: Tensor) -> None:
    """Sum a tensor over all ranks in place, with Horovod's all-reduce."""
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"undula.{tensor.dtype}.{tensor.numel()}")
    _await([handle])
    hvd.synchronize(handle)


def _await(handles: Iterable[Any]) -> None:
    """Poll operations until they are complete. Horovod's own wait spins, which takes the core that its thread or another rank needs."""
    while not all(map(hvd.poll, handles)):
        time.sleep(POLL_INTERVAL_S)


class SentAs:
    """Horovod `Compressor` that converts gradients to the dtype in which they are sent.

    Horovod accepts only contiguous tensors and does not support bfloat16.
    """

    def __init__(self, dtype: torch.dtype | None):
        self._dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        own = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
        return tensor.to(self._dtype or own).contiguous(), tensor.dtype

    def decompress(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)


class HorovodAccumulator(Accumulator):
    """Accumulator that reduces gradients by Horovod's DistributedOptimizer during the backward pass of each step's last micro-batch.

    Losses are weighted by their share of the step's samples, so the gradients of all ranks are summed. Ranks may have different numbers
    of micro-batches, so each rank sets its own number of backward passes per step. Only the reduction of DistributedOptimizer is used:
    it wraps an optimizer that never steps, so that the script's own optimizer keeps its class and its state.

    Args:
        module: Module on its device.
        sent_as: Dtype in which gradients are sent; None for their own dtype.
    """

    def __init__(self, module: nn.Module, sent_as: torch.dtype | None = None):
        super().__init__(module)
        self._reduction = hvd.DistributedOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.0),
            named_parameters=module.named_parameters(),
            compression=SentAs(sent_as),
            op=hvd.Sum,
        )

    def close(self) -> None:
        """Let the hooks, which cannot be removed, wait for more backward passes than there will be, so that they never send a gradient."""
        self._reduction.set_backward_passes_per_step(NEVER)

    def open(self, micro_batches: int) -> None:
        self._reduction.set_backward_passes_per_step(micro_batches)

    def finish(self, samples: int) -> None:
        if hvd.size() == 1:
            return
        used = torch.tensor([float(parameter.grad is not None) for parameter in self.parameters], device="cpu")
        counting = hvd.allreduce_async_(used, op=hvd.Sum, name="undula.used")
        self._send_the_rest()
        _await([counting, *(handle for handle, _ in self._reduction._handles.values())])
        self._reduction.synchronize()
        # Horovod sets a gradient that no rank has to zero. It becomes None again, so that the optimizer skips the parameter, as it
        # would on a single rank.
        for parameter, ranks in zip(self.parameters, hvd.synchronize(counting).tolist(), strict=True):
            if not ranks:
                parameter.grad = None

    def _send_the_rest(self) -> None:
        """Send the gradients that the last backward pass did not compute. Other ranks may wait for them, and Horovod sends them late."""
        sent = self._reduction._handles
        for parameter in self.parameters:
            if sent.get(parameter, (None, None))[0] is None:
                sent[parameter] = self._reduction._allreduce_grad_async(parameter)
