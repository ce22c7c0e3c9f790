"""One optimizer step as the script's loop uses it: its micro-batches, their backward passes, the reduction, and the update."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from undula.errors import UsageError
from undula.parallel.device_clock import Mark
from undula.plan.plan import MicroBatch
from undula.recovery.progress import COMPUTE, REDUCE, SHARDED_COMPUTE
from undula.train.boundary import StepBoundary
from undula.train.measurement import StepMeasurement, StepPhases
from undula.train.micro_batches import MicroBatches
from undula.train.randomness import seed_between_steps, seed_update
from undula.train.script_guard import check_loss
from undula.train.setup import RunSetup
from undula.train.step_reduction import exact_sum
from undula.train.trained_model import TrainedModel


class Step:
    """One optimizer step.

    Attributes:
        index: Number of the step in the plan, counted from 0 over the whole run. If an elastic batch merges several steps, it is the
            number of the first.
        epoch: Number of the epoch, counted from 0.
        samples: Number of samples in the step.
        lr: Learning rate of a parameter group whose initial rate is run.base_lr, or of the first group if the script has a scheduler.
        loss: Mean loss over the step's samples on all ranks; None before `update`.
        grad_norm: Norm of the step's gradient before clipping; None before `update`.
        micro_batch: Place in the plan of the current batch of `batches`; None outside of the loop.
        is_last: Whether the current batch is the last one of this rank in the step.
        applied: Whether the optimizer took the step. With `precision.compute: fp16`, a step whose gradient overflows is skipped.
    """

    loss: float | None = None
    grad_norm: float | None = None
    micro_batch: MicroBatch | None = None
    is_last = applied = updated = False
    _gradient: tuple[Tensor, Tensor] | None = None
    """Norm of the step's gradient, and whether it overflows on this rank; None before it is reduced."""
    _begin_of_pass: Mark | None = None
    """Begin of the forward pass whose backward pass is to come; None if there is none."""
    _has_begun = _has_ended = _is_yielding = False

    def __init__(
        self,
        setup: RunSetup,
        model: TrainedModel,
        batches: MicroBatches,
        boundary: StepBoundary,
        phases: StepPhases,
        index: int,
    ):
        self._job, self._layout, self._seed = setup.job, setup.layout, setup.job.plan.seed
        self._model, self._batches, self._boundary, self._phases = model, batches, boundary, phases
        self._planned = planned = setup.step(index)
        self.index, self.epoch = index, planned.epoch
        self.merged_steps, self.samples = planned.merged_steps, planned.samples
        self._rate = model.rate_of(planned)
        self._ends_epoch = planned.done % setup.plan.steps_per_epoch == 0
        self.lr = model.rates.lr(self._rate)
        self._measured = StepMeasurement(setup.layout.device)
        phases.begin_step()
        model.guard.begin_step(index)

    def _begin(self) -> None:
        """Begin the batches, unless `load` has done so."""
        if not self._has_begun:
            self._has_begun = True
            self._boundary.begin_batches()
            self._work = self._batches.begin_step(self.index, None if self._ends_epoch else self._planned.done)
            self._model.begin_step(self._planned, self._work)

    def load(self) -> list[Any]:
        """Read all samples of this rank in the step now, and return its micro-batches, which `batches` then yields.

        This is for a loss that is a mean over something else than samples, such as the tokens of the step: count them in all micro-batches,
        sum the count with `total`, and pass `share` to `backward`.

        Raises:
            UsageError: The samples were read before.
        """
        if self._has_begun:
            raise UsageError(
                f"step.load() was called after step.batches() or twice in step {self.index}; call it once, before step.batches()"
            )
        self._begin()
        return self._batches.load(self._work)

    def total(self, values: float | Sequence[float]) -> float:
        """Return the sum of values over all ranks. All ranks call this.

        Args:
            values: A number, or one for each batch of this rank. Pass numbers that are not integers as one for each batch: their sum is
                exact, whereas a sum over the batches of a rank is rounded, and would depend on the number of workers.
        """
        self._phases.enter(REDUCE)
        return exact_sum(values, self._layout.script)

    def batches(self) -> Iterator[Any]:
        """Yield the micro-batches of this rank's virtual workers. Call `backward` once for each of them."""
        if self._is_yielding:
            raise UsageError(
                f"step.batches() was called twice in step {self.index}, but it yields its samples only once; iterate over it once"
            )
        self._is_yielding = True
        self._begin()
        model, phase = self._model, SHARDED_COMPUTE if self._model.engine.capabilities.equal_rounds else COMPUTE
        for place, micro_batch in enumerate(self._work):
            placed = self._batches.take()
            self._measured.add_batch(placed, counts=micro_batch.samples > 0)
            if place:
                model.guard.end_batch(is_last=False)
            self.micro_batch, self.is_last = micro_batch, place == len(self._work) - 1
            self._begin_of_pass = self._measured.mark()
            self._phases.begin_batch(placed.batch, len(model.engine.trainable))
            model.begin_batch(micro_batch, self.is_last)
            self._phases.enter(phase)
            yield placed.batch
            self.micro_batch = None
            if self._begin_of_pass is not None:
                raise UsageError(
                    f"a batch of step {self.index} ended without step.backward(loss); call it once for each batch, and use "
                    "step.load() where all of them are needed at once"
                )
        self._has_ended = True
        # Otherwise ranks would draw other numbers for what they do to the gradient, each those of its last micro-batch.
        seed_update(self._seed, self.index)

    def backward(self, loss: Tensor, share: float | None = None) -> None:
        """Run the backward pass of the current batch, and accumulate its gradient.

        Args:
            loss: Mean loss over the batch's samples, a tensor with one element.
            share: Factor of this loss in the loss of the step, which is the sum over all batches of all ranks. By default it is the
                batch's share of the step's samples, so that the loss of the step is the mean over its samples.

        Raises:
            UsageError: There is no current batch, its backward pass has run already, the loss is not a tensor with one element, or the
                job measures the noise scale, which needs means over samples.
        """
        begin, self._begin_of_pass, micro_batch = self._begin_of_pass, None, self.micro_batch
        if begin is None or micro_batch is None:
            raise UsageError(
                "step.backward(loss) was called outside of a batch; call it once for each batch of step.batches()"
                if micro_batch is None
                else f"step.backward(loss), or backward() of an adapter, was called twice for a batch of step {self.index}; add up the "
                "losses, and call it once for their sum"
            )
        check_loss(loss, share, measures_noise=self._job.noise_every_steps > 0)
        part = micro_batch.samples / self.samples if share is None else share * bool(micro_batch.samples)
        self._model.backward(loss, part, micro_batch, self.is_last)
        if self.is_last:
            self._phases.enter(REDUCE)
        self._measured.add_pass(begin, self._model.engine.gradients_ready if self.is_last else None)
        if micro_batch.samples:  # the loss of no samples may be NaN, even if it is multiplied by 0
            self._measured.add_loss(loss, micro_batch.samples if share is None else share * self.samples)
        self._batches.read_ahead()

    def keep_gradients(self) -> None:
        """Undo `zero_grad` of the script after `backward`, for adapters of loops that step their optimizer in each batch."""
        self._model.guard.keep_gradients()

    def log(self, **values: float | Tensor) -> None:
        """Record values in the ledger, averaged over the step's samples.

        Inside the loop over `batches`, a value counts for the samples of the current batch. Outside of it, a value counts for the samples
        of all batches that this rank has run in the step.
        """
        self._measured.log(values, self.micro_batch)

    def reduce(self, max_norm: float | None = None) -> Tensor:
        """Reduce the gradient over all ranks and clip it, after the last batch. `update` does this if the script has not.

        Between both, the gradients of the parameters are those of the step, for example to look at their norms.

        Args:
            max_norm: Maximum norm of the gradient; by default `gradient.max_norm` of the job.

        Returns:
            Norm of the gradient before clipping, a scalar on the device.

        Raises:
            UsageError: The loop over `batches` has not ended, or the gradient was reduced before.
        """
        if self._gradient is not None:
            raise UsageError(
                f"step.reduce() was called twice or after step.update() in step {self.index}; call it once, after the last batch"
            )
        norm, _ = self._reduce("reduce", max_norm)
        return norm.clone()  # a change by the script must not reach the step's row

    def _reduce(self, caller: str, max_norm: float | None = None) -> tuple[Tensor, Tensor]:
        if not self._has_ended:
            raise UsageError(
                f"step.{caller}() was called before the loop over step.batches() of step {self.index} had ended; "
                "run all batches before calling it"
            )
        self._model.guard.end_batches()
        self._phases.enter(REDUCE)
        begin = self._measured.mark()
        self._gradient = self._model.reduce(self.samples, max_norm)
        self._measured.add_communication(begin)
        return self._gradient

    def update(self) -> None:
        """Reduce and clip the gradient, commit the step, and step the optimizer with the learning rate of the schedule."""
        if self.updated:
            raise UsageError(f"step.update() was called twice in step {self.index}; call it once, after the last batch")
        model, planned = self._model, self._planned
        norm, overflows = self._gradient or self._reduce("update")
        model.rates.set(model.optimizer, self._rate)
        # This commits the step. If a rank is lost before it returns, the other ranks keep the state before the step.
        totals = self._boundary.reduce(planned, self._measured, self._phases, norm, overflows)
        with self._boundary.changing_state(self.merged_steps, totals.changes):
            measured = model.update(planned, self._rate, totals)
            self.loss, self.grad_norm = totals.losses / self.samples, totals.grad_norm
            self.applied = not totals.overflows
        self._boundary.committed(planned, totals, self.lr, measured)
        self._phases.committed(planned.done)
        self.updated = True
        seed_between_steps(self._seed, "after the update", planned.done)
