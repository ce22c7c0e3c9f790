"""Validation over a fixed set of samples, cut into virtual workers as training is, so that no world size changes it."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from undula.data.manifest import Manifest
from undula.data.maps import SampleFunction
from undula.data.rows import Batch
from undula.data.streams import rank_stream
from undula.plan.plan import Plan, PlanSpec
from undula.recovery.handover import process
from undula.train.job import Job


def validation_plan(job: Job, manifest: Manifest) -> Plan:
    """Unshuffled full batches over the validation data; where it is smaller than a global batch, one short batch."""
    steps = -(-min(job.validation.samples or manifest.num_rows, manifest.num_rows) // job.plan.global_batch)
    spec = replace(job.plan, shuffle="none", epochs=1, max_steps=steps)
    assert isinstance(spec, PlanSpec)
    return Plan(spec, manifest.num_rows)


class Validation:
    """The validation of a rank.

    Args:
        world_size: where every rank must run the model equally often, as it gathers the model's parameters; else None.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Batch], Tensor],
        job: Job,
        manifest: Manifest,
        function: SampleFunction | None,
        virtual_workers: range,
        device: torch.device,
        world_size: int | None,
    ):
        self._model = model
        self._loss = loss
        self._job = job
        self._manifest = manifest
        self._function = function
        self._plan = validation_plan(job, manifest)
        self._virtual_workers = virtual_workers
        self._device = device
        self._rounds = self._plan.rounds(range(self._plan.total_steps), world_size) if world_size else 0

    def losses(self) -> tuple[list[float], int]:
        """For each micro-batch of this rank the sum of the loss over its samples, and the number of samples."""
        stream = rank_stream(self._manifest, self._plan, self._virtual_workers, self._job.data, 0, self._function)
        steps = range(self._plan.total_steps)
        losses: list[float] = []
        samples = 0
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                for each in self._plan.work(steps, self._virtual_workers):
                    process.enter("other")
                    losses.append(self._loss_of(stream.take(each.virtual_worker, each.samples).batch) * each.samples)
                    samples += each.samples
                for _ in range(self._rounds - len(losses)):
                    process.enter("other")
                    self._loss_of(stream.any_rows(1).batch)
        finally:
            stream.close()
            self._model.train(was_training)
        return losses, samples

    def _loss_of(self, batch: Batch) -> float:
        placed = {name: value.to(self._device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        return float(self._loss(placed))
