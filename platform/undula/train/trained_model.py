"""The model of a run on a rank, and everything that a step does to it, in order."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undula.parallel.engines.engine import Engine
from undula.parallel.layout import Layout
from undula.plan.plan import MicroBatch, OptimizerStep, Plan
from undula.recovery.baseline import Baseline
from undula.state.events import BatchEvent
from undula.train.buffers import BufferMean
from undula.train.job import Job
from undula.train.learning_rate import OptimizerRates, StepRate, rate_for
from undula.train.noise_scale import NoiseScaleMeter
from undula.train.randomness import seed_micro_batch, seed_update
from undula.train.script_guard import ScriptGuard
from undula.train.step_part import FrozenParameters, LossScale, StepPart, Update, added_parts
from undula.train.step_reduction import StepTotals


class TrainedModel:
    """Model and optimizer of a run, with the parts that take part in each of its steps.

    A step calls `begin_step`, for each of its micro-batches `begin_batch` and `backward`, and then `reduce` and `update`.

    Args:
        job: Settings of the job.
        plan: Plan of the run.
        layout: Layout of the worker group.
        engine: Engine of the model.
        module: Module that the script calls.
        rates: Learning rates of the optimizer, which the engine has been given.

    Attributes:
        added: Names of the parts of the step that other packages add.
    """

    def __init__(self, job: Job, plan: Plan, layout: Layout, engine: Engine, module: nn.Module, rates: OptimizerRates):
        self._job, self._plan, self._layout = job, plan, layout
        self.engine, self.module, self.rates = engine, module, rates
        self.baseline = Baseline(engine.module, engine.optimizer)
        self.guard = ScriptGuard(engine, module, engine.optimizer, self.baseline)
        self._noise = NoiseScaleMeter(job.noise_every_steps, job.gradient_scale, engine.watch_gradients)
        self.loss_scale = LossScale(job.precision)
        buffers = BufferMean(engine.module, layout, plan.spec.virtual_workers)
        own: list[StepPart] = [buffers, FrozenParameters(engine.module), self._noise, self.loss_scale]
        added = added_parts(job, engine.module, engine.optimizer, layout, plan.spec.virtual_workers)
        self._parts, self.added = (*own, *added.values()), tuple(added)
        self._rate, _ = rate_for(job.schedule, plan, layout.num_cells, 0, {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    def values(self) -> dict[str, Any]:
        """Return the pieces and values that belong to the state of the run beside those of the model and the optimizer, by name."""
        return {
            **{name: value for part in self._parts for name, value in part.state().items()},
            **self._rate.values(),
            **self.rates.values(),
            **self.baseline.work.values(),
        }

    def restore(self, values: Mapping[str, Any], start: int) -> BatchEvent | None:
        """Continue with the learning rates and the frozen parameters of a restored state.

        Args:
            values: Values of the state.
            start: Number of steps that it includes.

        Returns:
            Event about a batch size that has changed; None if it has not.
        """
        job, plan, cells = self._job, self._plan, self._layout.num_cells
        self._rate, change = rate_for(job.schedule, plan, cells, start, values)
        self.rates.restore(values)
        for part in self._parts:
            part.restore(values)
        return change

    def rate_of(self, step: OptimizerStep) -> StepRate:
        """Return the learning rate of a step."""
        return self._rate.at(step.samples_after, step.samples, step.merged_steps, self._noise.measured)

    def begin_step(self, step: OptimizerStep, work: Sequence[MicroBatch]) -> None:
        """Begin the batches of a step with the micro-batches of this rank."""
        self.guard.meet_after_freezing()
        self.engine.begin_step(work)
        self.guard.begin_batches()
        for part in self._parts:
            part.begin_step(step.index, step.merged_steps)

    def begin_batch(self, micro_batch: MicroBatch, is_last: bool) -> None:
        """Prepare the forward pass of a micro-batch."""
        self.engine.before_forward(is_last)
        for part in self._parts:
            part.begin_micro_batch()
        seed_micro_batch(self._job.plan.seed, micro_batch.step, micro_batch.virtual_worker, micro_batch.number)
        self.guard.begin_batch()

    def backward(self, loss: Tensor, part: float, micro_batch: MicroBatch, is_last: bool) -> None:
        """Run the backward pass of a micro-batch, whose loss is this part of the loss of the step."""
        weight = self._job.gradient_scale * part * (self.loss_scale.factor or 1.0)
        for each in self._parts:
            each.begin_backward()
        self.guard.before_backward()
        self.engine.backward(loss, weight, micro_batch, is_last)
        self.guard.after_backward()
        for each in self._parts:
            each.end_micro_batch(micro_batch.samples, micro_batch.virtual_worker)

    def reduce(self, samples: int, max_norm: float | None) -> tuple[Tensor, Tensor]:
        """Reduce and clip the gradient of a step of so many samples.

        Returns:
            Norm of the gradient before clipping, and whether it overflows on this rank, as scalars on the device.
        """
        gradient = self.engine.finish_gradients(samples, max_norm=max_norm, loss_scale=self.loss_scale.factor)
        for part in self._parts:
            part.end_step(samples)
        return gradient

    def small_squares(self, samples: int) -> list[float]:
        """Return the squared gradient norms of this rank's micro-batches; empty if the step does not measure the noise scale."""
        return self._noise.small_squares(samples, self.loss_scale.factor or 1.0)

    def update(self, step: OptimizerStep, rate: StepRate, totals: StepTotals) -> dict[str, float]:
        """Step the optimizer, unless the gradient overflowed on any rank.

        Returns:
            What the parts of the step have measured, by name.
        """
        update = Update(step, totals, rate.clock)
        seed_update(self._job.plan.seed, step.index)
        with self.guard.own_update():
            self.engine.step(update.applies)
        if update.applies:
            self.rates.advance()
        return {name: value for part in self._parts for name, value in part.updated(update).items()}
