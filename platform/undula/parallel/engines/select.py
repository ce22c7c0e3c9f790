"""Which engine trains a module."""

import torch
from torch import nn

from undula.parallel.collectives import sum_over_ranks
from undula.parallel.engines.adasum import AdasumEngine
from undula.parallel.engines.torch_engines import Engine, ExactEngine, TorchEngine, is_sharded
from undula.plan.plan import assign
from undula.train.job import Job

WHOLE_GRADIENTS = "sums whole gradients, and this model is sharded: leave out one of the two"


def engine_for(module: nn.Module, device: torch.device, job: Job, rank: int, world_size: int) -> Engine:
    """What trains a module as a job says.

    Raises:
        RuntimeError: nothing can.
    """
    if is_sharded(module):
        return _sharded(module, job)
    all_reduce = sum_over_ranks
    if job.engine == "horovod":
        from undula.parallel.engines.horovod import HorovodEngine, sum_over_horovod

        all_reduce = sum_over_horovod
    if job.deterministic:
        return ExactEngine(device, all_reduce)
    if job.gradient.reduce == "adasum":
        return AdasumEngine(device, assign(job.plan.virtual_workers, world_size), rank, all_reduce)
    sent_as = torch.float16 if job.gradient.compression == "fp16" else None
    if job.engine == "horovod":
        return HorovodEngine(device, sent_as)
    return TorchEngine(device, sent_as)


def _sharded(module: nn.Module, job: Job) -> Engine:
    gradient = job.gradient
    for key, is_so in (
        ("deterministic: true", job.deterministic),
        ("engine: horovod", job.engine == "horovod"),
        ("gradient.reduce: adasum", gradient.reduce == "adasum"),
        ("gradient.compression: fp16", gradient.compression != "none"),
    ):
        if is_so:
            raise RuntimeError(f"{key} {WHOLE_GRADIENTS}")
    from torch.distributed.fsdp import FSDPModule

    from undula.parallel.engines.fsdp import ShardedEngine

    if not isinstance(module, FSDPModule):
        raise RuntimeError("run.model() got a module of which only parts are sharded: call fully_shard() on it as well")
    return ShardedEngine()
