"""Horovod's side of the loop; imported only where a job's engine is Horovod, which nothing else needs."""

import time

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from undula.run.engine import Engine

LOOK_S = 0.0002
COMPRESSION = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}


def sum_over_horovod(tensor: Tensor) -> None:
    """An AllReduce of Horovod's."""
    hvd.allreduce_(tensor, op=hvd.Sum, name=f"undula.{tensor.dtype}.{tensor.numel()}")


class HorovodEngine(Engine):
    """Reduces gradients by Horovod's DistributedOptimizer, while the backward pass of a step's last micro-batch goes on.

    Losses come in weighted by their samples over the step's, so that the op is the sum, whatever the ranks have. Ranks run the model
    as often as they have micro-batches: each tells how many backward passes its step has. Of the DistributedOptimizer only the
    reduction is used, around an optimizer that never steps: the script's own keeps its class and its state.
    """

    def __init__(self, device: torch.device, compression: str):
        self.device = device
        self._compression = COMPRESSION[compression]

    def wrap(self, module: nn.Module) -> nn.Module:
        module = module.to(self.device)
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        self._reduction = hvd.DistributedOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.0),
            named_parameters=module.named_parameters(),
            compression=self._compression,
            op=hvd.Sum,
        )
        return module

    def begin_step(self, micro_batches: int) -> None:
        self._reduction.set_backward_passes_per_step(micro_batches)

    def end_step(self, samples: int) -> None:
        # Horovod's own wait goes round without a pause, at the cost of the core on which its thread, or another rank, could work.
        while any(handle is not None and not hvd.poll(handle) for handle, _ in self._reduction._handles.values()):
            time.sleep(LOOK_S)
        self._reduction.synchronize()
