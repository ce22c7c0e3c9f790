"""Validation on a fixed set of samples, which virtual workers share as in training, so that its result is equal at any world size.

A loss may draw random numbers, for example to mask tokens. They are keyed like those of training, but not by the step of the run.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from undula.data.manifest import Manifest
from undula.data.maps import SampleFunction
from undula.data.rows import Batch
from undula.data.streams import rank_stream
from undula.parallel.layout import Layout
from undula.parallel.random_state import kept_random_state
from undula.plan.plan import Plan, PlanSpec
from undula.recovery.progress import DATA, SHARDED_VALIDATE, VALIDATE, Phase
from undula.train.job import Job
from undula.train.randomness import seed_validation

Loss = Callable[[Batch], Tensor]
"""Function that returns the mean loss over a batch's samples, as a scalar tensor."""


def validation_plan(job: Job, manifest: Manifest) -> Plan:
    """Return the plan of a validation. It takes each sample once, in stored order, in full steps except where the data ends."""
    steps = -(-min(job.validation.samples or manifest.num_rows, manifest.num_rows) // job.plan.global_batch)
    spec = replace(job.plan, shuffle="none", last_step="short", epochs=1, max_steps=steps)
    assert isinstance(spec, PlanSpec)
    return Plan(spec, manifest.num_rows)


class Validation:
    """Validates the model on one rank.

    Args:
        model: Module that the script calls.
        loss: Function that returns the mean loss of a batch.
        job: Settings of the job.
        manifest: Manifest of the validation data.
        function: Transform of the samples; None for none.
        layout: Layout of the worker group.
        enter: Function that is called with each phase that the rank enters.
        equal_rounds: Whether all ranks must run the same number of micro-batches, because forward passes contain collectives.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        job: Job,
        manifest: Manifest,
        function: SampleFunction | None,
        layout: Layout,
        enter: Callable[[Phase], None],
        equal_rounds: bool,
    ):
        self._model = model
        self._loss = loss
        self._job = job
        self._manifest = manifest
        self._function = function
        self._layout = layout
        self._enter = enter
        self._phase = SHARDED_VALIDATE if equal_rounds else VALIDATE
        self._plan = validation_plan(job, manifest)
        self._rounds = layout.rounds(self._plan, range(self._plan.total_steps)) if equal_rounds else 0

    def losses(self) -> tuple[list[float], int]:
        """Return the sum of the loss over the samples of each micro-batch of this rank, and the number of all these samples."""
        with kept_random_state(), torch.no_grad():
            return self._losses()

    def _losses(self) -> tuple[list[float], int]:
        virtual_workers = self._layout.virtual_workers(self._job.plan.virtual_workers)
        stream = rank_stream(self._manifest, self._plan, virtual_workers, self._job.data, 0, self._function)
        steps = range(self._plan.total_steps)
        losses: list[float] = []
        samples = 0
        was_training = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            for each in self._plan.work(steps, virtual_workers):
                self._enter(DATA)
                batch = stream.take(each.virtual_worker, each.samples).batch
                seed_validation(self._job.plan.seed, each.step, each.virtual_worker, each.number)
                losses.append(self._loss_of(batch) * each.samples)
                samples += each.samples
            for _ in range(self._rounds - len(losses)):
                self._enter(DATA)
                self._loss_of(stream.any_rows(1).batch)
        finally:
            stream.close()
            for module, mode in was_training.items():
                module.training = mode  # unlike train(), this keeps layers in eval mode that the script has frozen
        return (losses, samples) if self._layout.leads_cell else ([], 0)

    def _loss_of(self, batch: Batch) -> float:
        self._enter(self._phase)
        device = self._layout.device
        placed = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        return float(self._loss(placed))
