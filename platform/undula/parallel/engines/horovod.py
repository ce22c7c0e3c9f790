"""Horovod's side of the loop; imported only where a job's engine is Horovod, which nothing else needs."""

import time
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from undula.parallel.collectives import broadcast_from_rank_0
from undula.parallel.engines.torch_engines import Engine

LOOK_S = 0.0002


def sum_over_horovod(tensor: Tensor) -> None:
    """An AllReduce of Horovod's."""
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"undula.{tensor.dtype}.{tensor.numel()}")
    _await([handle])
    hvd.synchronize(handle)


def _await(handles: Iterable[Any]) -> None:
    """Horovod's own wait goes round without a pause, at the cost of the core on which its thread, or another rank, could work."""
    while not all(map(hvd.poll, handles)):
        time.sleep(LOOK_S)


class SentAs:
    """How gradients go over the network: a Compressor of Horovod's, which has no bfloat16 and takes contiguous tensors alone."""

    def __init__(self, dtype: torch.dtype | None):
        self._dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        own = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
        return tensor.to(self._dtype or own).contiguous(), tensor.dtype

    def decompress(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)


class HorovodEngine(Engine):
    """Reduces gradients by Horovod's DistributedOptimizer, while the backward pass of a step's last micro-batch goes on.

    Losses come in weighted by their samples over the step's, so that the op is the sum, whatever the ranks have. Ranks run the model
    as often as they have micro-batches: each tells how many backward passes its step has. Of the DistributedOptimizer only the
    reduction is used, around an optimizer that never steps: the script's own keeps its class and its state.

    Args:
        device: of this rank.
        sent_as: type in which gradients go over the network; None for their own.
    """

    def __init__(self, device: torch.device, sent_as: torch.dtype | None = None):
        self.device = device
        self._sent_as = sent_as

    def wrap(self, module: nn.Module) -> nn.Module:
        if sparse := [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]:
            raise RuntimeError(
                f"engine: horovod sums dense gradients alone: leave out sparse=True of {', '.join(sparse)}"
            )
        module = module.to(self.device)
        broadcast_from_rank_0(module)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._reduction = hvd.DistributedOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.0),
            named_parameters=module.named_parameters(),
            compression=SentAs(self._sent_as),
            op=hvd.Sum,
        )
        return module

    def begin_step(self, micro_batches: int) -> None:
        self._reduction.set_backward_passes_per_step(micro_batches)

    def end_step(self, samples: int) -> None:
        if hvd.size() == 1:
            return
        used = torch.tensor([float(parameter.grad is not None) for parameter in self._parameters])
        counting = hvd.allreduce_async_(used, op=hvd.Sum, name="undula.used")
        self._send_the_rest()
        _await([counting, *(handle for handle, _ in self._reduction._handles.values())])
        self._reduction.synchronize()
        # Horovod makes zeros of gradients that no rank has; the optimizer of a rank that is alone would pass them over.
        for parameter, ranks in zip(self._parameters, hvd.synchronize(counting).tolist(), strict=True):
            if not ranks:
                parameter.grad = None

    def _send_the_rest(self) -> None:
        """Gradients that the last backward pass did not have: other ranks may wait for them, and Horovod sends them only as it waits."""
        sent = self._reduction._handles
        for parameter in self._parameters:
            if sent.get(parameter, (None, None))[0] is None:
                sent[parameter] = self._reduction._allreduce_grad_async(parameter)
