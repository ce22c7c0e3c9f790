"""Memory of a training step as it is counted in advance, and as it is in a run."""

from collections.abc import Callable

import torch

from undula.plan.memory import Division
from undula.plan.step_memory import moments, peak
from undula.train.dry_run.count import count
from undula.train.dry_run.counting import Count, Setting
from undula.train.dry_run.storages import LiveStorages
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import SingleProcess


def predicted(train: Callable[[Run], None], job: Job, on_gpu: bool = False) -> tuple[Count, float]:
    """Return what is counted of a job with its own settings, and the peak of a step on one rank in bytes."""
    plan = job.plan
    share = plan.global_batch // plan.virtual_workers
    samples = min(plan.micro_batch or share, share)
    setting = Setting(job.precision.compute, job.activations, samples)
    counted = count(train, job, [setting])
    division = Division(plan.virtual_workers, -(-share // samples), 1)
    return counted, peak(moments(counted.state, counted.passes[setting], division, on_gpu)).total


class OwnStorages(LiveStorages):
    """Counts no views that NumPy has made of tensors, which torch takes for memory of their own."""

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided or tensor.untyped_storage().resizable():
            super().add(tensor)


def measured(train: Callable[[Run], None], job: Job) -> int:
    """Return the peak of a run of a job in this process, in bytes."""
    live = OwnStorages()

    def counting(run: Run) -> None:
        with live:
            train(run)

    SingleProcess(counting, job, lambda message: None, device=torch.device("cpu"))()
    return live.peak
