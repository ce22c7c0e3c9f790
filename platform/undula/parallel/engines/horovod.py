"""The engine of jobs with `engine: horovod`; imported only for one, because nothing else needs Horovod."""

import time
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from undula.parallel.capabilities import HOROVOD
from undula.parallel.engines.engine import Engine
from undula.parallel.layout import Layout

POLL_INTERVAL_S = 0.0002


def sum_over_horovod(tensor: Tensor) -> None:
    """The all-reduce of Horovod, over all ranks."""
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"undula.{tensor.dtype}.{tensor.numel()}")
    _await([handle])
    hvd.synchronize(handle)


def _await(handles: Iterable[Any]) -> None:
    """Wait with pauses between looks. Horovod's own wait spins, and so takes the core that its thread or another rank could use."""
    while not all(map(hvd.poll, handles)):
        time.sleep(POLL_INTERVAL_S)


class SentAs:
    """The type in which gradients travel, as a Compressor of Horovod, which takes contiguous tensors only and has no bfloat16."""

    def __init__(self, dtype: torch.dtype | None):
        self._dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        own = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
        return tensor.to(self._dtype or own).contiguous(), tensor.dtype

    def decompress(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)


class HorovodEngine(Engine):
    """Reduces gradients by Horovod's DistributedOptimizer, while the backward pass of a step's last micro-batch goes on.

    Losses come weighted by their share of the step's samples, so the operation is the sum, whatever the ranks have. A rank runs the
    model as often as it has micro-batches: each says how many backward passes its step has. Only the reduction of the
    DistributedOptimizer is used, around an optimizer that never steps: the script's own optimizer keeps its class and its state.

    Args:
        layout: the ranks of the worker group.
        sent_as: type in which gradients travel; None for their own.
    """

    capabilities = HOROVOD

    def __init__(self, layout: Layout, sent_as: torch.dtype | None = None):
        super().__init__(layout)
        self._sent_as = sent_as
        self._reduction: Any = None

    def lay_out(self) -> None:
        self._reduction = None  # and with it the hooks of a former one, before there are new ones
        self._reduction = hvd.DistributedOptimizer(
            torch.optim.SGD(self.module.parameters(), lr=0.0),
            named_parameters=self.module.named_parameters(),
            compression=SentAs(self._sent_as),
            op=hvd.Sum,
        )

    def begin_step(self, micro_batches: int) -> None:
        super().begin_step(micro_batches)
        self._reduction.set_backward_passes_per_step(micro_batches)

    def reduce_gradients(self, samples: int) -> None:
        if hvd.size() == 1:
            return
        used = torch.tensor([float(parameter.grad is not None) for parameter in self.trainable])
        counting = hvd.allreduce_async_(used, op=hvd.Sum, name="undula.used")
        self._send_the_rest()
        _await([counting, *(handle for handle, _ in self._reduction._handles.values())])
        self._reduction.synchronize()
        # Horovod makes zeros of gradients that no rank has; the optimizer of a rank by itself would pass them over.
        for parameter, ranks in zip(self.trainable, hvd.synchronize(counting).tolist(), strict=True):
            if not ranks:
                parameter.grad = None

    def _send_the_rest(self) -> None:
        """Send the gradients that the last backward pass did not bring: other ranks may wait for them, and Horovod sends them late."""
        sent = self._reduction._handles
        for parameter in self.trainable:
            if sent.get(parameter, (None, None))[0] is None:
                sent[parameter] = self._reduction._allreduce_grad_async(parameter)
