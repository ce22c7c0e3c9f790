"""One optimizer step as the script's loop uses it: its micro-batches, their backward passes, and the commit."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from undula.data.nested import tensors_of
from undula.errors import UsageError
from undula.parallel.device_clock import Mark, mark_on, read_scalars
from undula.plan.keys import Ids, multiset_digest
from undula.plan.plan import MicroBatch
from undula.recovery.progress import BETWEEN_STEPS, COMPUTE, DATA, REDUCE, SHARDED_COMPUTE, Phase
from undula.state.digest import additive_digest
from undula.state.events import SkipEvent, WarningEvent
from undula.state.model_state import MODEL
from undula.state.records import StepRow
from undula.train.boundary import StepBoundary
from undula.train.context import Kind, TrainContext
from undula.train.loss_scale import LONG_SKIPPED_STEPS
from undula.train.randomness import seed_between_steps, seed_micro_batch, seed_update
from undula.train.step_reduction import LocalStep, StepTotals

STEP_SECONDS = ("data_s", "transfer_s", "compute_s", "communication_s")
DIGEST_EVERY = 10
"""Number of steps between digests of the weights in the ledger of a deterministic run."""


class Step:
    """One optimizer step.

    Attributes:
        index: Number of the step in the plan, counted from 0 over the whole run. If an elastic batch merges several steps, it is the
            number of the first.
        samples: Number of samples in the step.
        lr: Learning rate at this step of a parameter group whose initial rate is run.base_lr, or of the first group if the script has a
            scheduler of its own.
        loss: Mean loss over the step's samples on all ranks; None before `update`.
        grad_norm: Norm of the step's gradient before clipping; None before `update`.
        micro_batch: Place in the plan of the current batch of `batches`; None outside of the loop.
        is_last: Whether the current batch is the last one of this rank in the step.
        applied: Whether the optimizer took the step. With `precision.compute: fp16`, a step whose gradient overflows is skipped.
    """

    loss: float | None = None
    grad_norm: float | None = None
    applied = False

    def __init__(self, context: TrainContext, boundary: StepBoundary, index: int):
        self._context = context
        self._boundary = boundary
        self._began = time.perf_counter()
        self._data_s = 0.0
        self._intervals: list[tuple[str, Mark, Mark]] = []
        self._losses: list[tuple[Tensor, float]] = []
        """Loss of each micro-batch and the number of samples for which it counts."""
        self._ids: list[Ids] = []
        """Ids of the samples of each micro-batch that counts."""
        self._local = LocalStep()
        self._kinds: set[Kind] = set()
        self.micro_batch: MicroBatch | None = None
        self._following: Iterator[MicroBatch | None] = iter(())
        """For each micro-batch whose backward pass is to come, the one that will be read after it; None if it was read before."""
        self._in_micro_batch: Mark | None = None
        self._work: list[MicroBatch] = []
        self._loaded: list[Any] = []
        """Micro-batches that `load` has read and `batches` has not yielded yet."""
        self._reduced_gradient: tuple[Tensor, Tensor] | None = None
        """Norm of the step's gradient, and whether it overflows on this rank; None before it is reduced."""
        self._has_begun = self._has_ended = self.is_last = False
        plan = context.setup.plan
        self.index = index
        self.merged_steps = plan.merged_steps(index, context.setup.layout.num_cells)
        """Number of steps of the plan that this step merges."""
        self._shapes = [plan.step(each) for each in range(index, index + self.merged_steps)]
        self.samples = sum(shape.samples for shape in self._shapes)
        self._samples_after = self._shapes[0].samples_before + self.samples
        self._rate = context.rate.at(self._samples_after, self.samples, self.merged_steps, context.noise.measured)
        self.lr = context.rates.lr(self._rate)
        self._loss_scale = context.loss_scale.factor or 1.0
        self.updated = False
        context.guard.begin_step(index)

    def batches(self) -> Iterator[Any]:
        """Yield the micro-batches of this rank's virtual workers. Call `backward` once for each of them."""
        if self._has_begun:
            raise UsageError(
                f"step.batches() was called twice in step {self.index}, but it yields its samples only once; iterate over it once"
            )
        self._has_begun = True
        if not self._work:
            self._begin()
        context, work = self._context, self._work
        engine = context.engine
        for place, each in enumerate(work):
            batch = self._loaded.pop(0) if self._loaded else self._next_batch(each.virtual_worker, each.samples)
            if place:
                context.guard.end_batch(is_last=False)
            self.is_last = place == len(work) - 1
            engine.before_forward(self.is_last)
            context.buffers.begin_micro_batch()
            seed_micro_batch(context.setup.job.plan.seed, each.step, each.virtual_worker, each.number)
            self.micro_batch = each
            self._in_micro_batch = mark_on(context.setup.layout.device)
            self._kinds.add(_kind(batch, len(engine.trainable)))
            context.guard.begin_batch()
            self._enter(SHARDED_COMPUTE if engine.capabilities.equal_rounds else COMPUTE)
            yield batch
            self.micro_batch = None
            if self._in_micro_batch is not None:
                raise UsageError(
                    f"a batch of step {self.index} ended without step.backward(loss); call it once for each batch"
                )
        self._has_ended = True
        # Otherwise ranks would draw other numbers for what they do to the gradient, each those of its last micro-batch.
        seed_update(context.setup.job.plan.seed, self.index)

    def load(self) -> list[Any]:
        """Read all samples of this rank in the step now, and return its micro-batches, which `batches` then yields.

        This is for a loss that is a mean over something else than samples, such as the tokens of the step: count them in all micro-batches,
        sum the count with `total`, and pass `share` to `backward`.

        Raises:
            UsageError: The samples were read before.
        """
        if self._work:
            raise UsageError(
                f"step.load() was called after step.batches() or twice in step {self.index}; call it once, before step.batches()"
            )
        self._begin()
        self._loaded = [self._next_batch(each.virtual_worker, each.samples) for each in self._work]
        self._following = chain([None] * (len(self._work) - 1), self._first_of_next())
        return [batch for batch, each in zip(self._loaded, self._work, strict=True) if each.samples]

    def total(self, value: float) -> float:
        """Return the sum of a value over all ranks, which is exact for integers. All ranks call this.

        Ranks that share the micro-batches of a sharded model count once.
        """
        layout = self._context.setup.layout
        vector = torch.tensor([value if layout.leads_cell else 0.0], dtype=torch.float64, device="cpu")
        self._enter(REDUCE)
        dist.all_reduce(vector, group=layout.control)
        return float(vector)

    def _begin(self) -> None:
        """Prepare the engine, the buffers and the noise scale for the micro-batches of this rank."""
        context = self._context
        # Otherwise the script has repeated work that the former group had not finished.
        if is_repeating := context.script_state.owed_since is not None:
            self._boundary.settle(owed_since=None)
        equal = context.engine.capabilities.equal_rounds
        self._work = context.setup.padded_work(self.index, self.merged_steps, equal)
        context.buffers.begin_step()
        context.engine.begin_step(len(self._work))
        context.guard.begin_batches(is_repeating)
        self._following = chain(self._work[1:], self._first_of_next())
        context.noise.begin_step(self.index, self.merged_steps, context.engine.trainable)

    def _first_of_next(self) -> list[MicroBatch]:
        """Return the first micro-batch of this rank in the next step; empty at the end of the plan."""
        setup, later = self._context.setup, self.index + self.merged_steps
        return setup.work(later, setup.plan.merged_steps(later, setup.layout.num_cells))[:1]

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
        context, micro_batch = self._context, self.micro_batch
        begin, self._in_micro_batch = self._in_micro_batch, None
        if begin is None or micro_batch is None:
            raise UsageError(
                "step.backward(loss) was called outside of a batch; call it once for each batch of step.batches()"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else None
            found = shape or f"an object of type {type(loss).__name__}"
            raise UsageError(
                f"step.backward(loss) got {found}; pass the mean loss over the batch's samples as a tensor with one element"
            )
        samples: float = micro_batch.samples
        if share is not None and samples:
            if context.setup.job.noise_every_steps:
                raise UsageError(
                    "step.backward() got a share, but the job measures the gradient noise scale, which needs mean losses over samples; set "
                    "gradient.noise_every_steps=0 and another schedule.batch_rule, or remove the share"
                )
            samples = share * self.samples
        context.noise.begin_backward()
        part = micro_batch.samples / self.samples if share is None else share * bool(micro_batch.samples)
        weight = context.setup.job.gradient_scale * part * self._loss_scale
        context.guard.before_backward()
        context.engine.backward(loss, weight, micro_batch, self.is_last)
        context.guard.after_backward()
        context.noise.end_backward(micro_batch.samples)
        if self.is_last:
            self._enter(REDUCE)
        end = mark_on(context.setup.layout.device)
        ready = context.engine.gradients_ready if self.is_last else None
        self._intervals += [("compute_s", begin, ready or end), ("communication_s", ready or end, end)]
        if micro_batch.samples:  # the loss of no samples may be NaN, even if it is multiplied by 0
            self._losses.append((loss.detach().reshape(()).to(torch.float64, copy=True), samples))
        context.buffers.end_micro_batch(micro_batch.samples)
        following = next(self._following, None)
        if following and context.batches and context.batches.reads_ahead:
            context.setup.worker.enter(DATA)
            context.batches.begin_next(following.virtual_worker, following.samples)

    def keep_gradients(self) -> None:
        """Undo `zero_grad` of the script after `backward`, for adapters of loops that step their optimizer in each batch."""
        self._context.guard.keep_gradients()

    def log(self, **values: float | Tensor) -> None:
        """Record values in the ledger, averaged over the step's samples.

        Inside the loop over `batches`, a value counts for the samples of the current batch. Outside of it, a value counts for the samples
        of all batches that this rank has run in the step.
        """
        inside = self.micro_batch
        weight = float(inside.samples if inside else sum(size for _, size in self._losses))
        if not weight:  # a value of no samples may be NaN, even if it is multiplied by 0
            return
        for name, value in values.items():
            total, weights = self._local.logged.get(name, (0.0, 0.0))
            self._local.logged[name] = (total + float(value) * weight, weights + weight)

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
        if self._reduced_gradient is not None:
            raise UsageError(
                f"step.reduce() was called twice or after step.update() in step {self.index}; call it once, after the last batch"
            )
        return self._reduce("reduce", max_norm).clone()  # a change by the script must not reach the step's row

    def _reduce(self, caller: str, max_norm: float | None) -> Tensor:
        context, job = self._context, self._context.setup.job
        if not self._has_ended:
            raise UsageError(
                f"step.{caller}() was called before the loop over step.batches() of step {self.index} had ended; "
                "run all batches before calling it"
            )
        context.guard.end_batches()
        self._enter(REDUCE)
        begin = mark_on(context.setup.layout.device)
        limit = job.gradient.max_norm if max_norm is None else max_norm
        self._reduced_gradient = context.engine.finish_gradients(self.samples, limit, context.loss_scale.factor)
        if context.buffers.is_needed:
            context.buffers.end_step(self.samples)
        self._intervals.append(("communication_s", begin, mark_on(context.setup.layout.device)))
        return self._reduced_gradient[0]

    def update(self) -> None:
        """Reduce and clip the gradient, commit the step, and step the optimizer with the learning rate of the schedule."""
        context, job = self._context, self._context.setup.job
        if self.updated:
            raise UsageError(f"step.update() was called twice in step {self.index}; call it once, after the last batch")
        if self._reduced_gradient is None:
            self._reduce("update", None)
        assert self._reduced_gradient is not None
        context.rates.set(context.optimizer, self._rate)
        # This commits the step. If a rank is lost before it returns, the other ranks keep the state before the step.
        totals = self._reduced(*self._reduced_gradient)
        with self._boundary.changing_state(self.merged_steps):
            seed_update(job.plan.seed, self.index)
            with context.guard.own_update():
                context.engine.step(applies=not totals.overflows)
            if not totals.overflows:
                context.rates.advance()
            context.loss_scale.update(totals.overflows)
            norms = None if totals.overflows else totals.norms(self.samples, job.gradient_scale)
            noise = context.noise.keep(norms, self._rate.clock)
            self.loss, self.grad_norm = totals.losses / self.samples, totals.grad_norm
            self.applied = not totals.overflows
        measured = {"noise_scale": noise, "loss_scale": self._loss_scale if context.loss_scale.is_used else None}
        self._commit(totals, {name: value for name, value in measured.items() if value is not None})
        self.updated = True
        seed_between_steps(job.plan.seed, "after the update", self.index + self.merged_steps)

    def _check_moved(self, before: bool, within: bool) -> None:
        if (before or within) and self._context.snapshots:  # the last one may have been taken while parameters changed
            self._context.snapshots.discard()
        self._context.guard.check_moved(before, within)

    def _enter(self, phase: Phase) -> None:
        """Record the phase that this rank enters. It may take long if the group has not committed a step with such batches yet."""
        self._context.setup.worker.enter(phase.unless_known(self._kinds <= self._context.known_kinds))

    def _next_batch(self, virtual_worker: int, size: int) -> Any:
        setup, batches = self._context.setup, self._context.batches
        assert batches is not None
        setup.worker.enter(DATA)
        placed = batches.take(virtual_worker, size)
        if size and setup.layout.leads_cell:
            # What was only read ahead does not count: another group may consume it.
            self._ids.append(placed.ids)
        self._data_s += placed.data_s
        self._intervals.append(("transfer_s", *placed.waits))
        return placed.batch

    def _reduced(self, norm: Tensor, overflows: Tensor) -> StepTotals:
        """Return the measurements of the step, reduced over all ranks. On a GPU this waits for the backward pass.

        Raises:
            UsageError: Parameters changed before the update.
        """
        context, local, layout = self._context, self._local, self._context.setup.layout
        scalars = [norm, overflows, *context.guard.moved, *(loss for loss, _ in self._losses)]
        grad_norm, has_overflowed, moved, moved_within, *losses = read_scalars(scalars)
        self._check_moved(bool(moved), bool(moved_within))
        local.wants = self._boundary.wants()
        self._enter(REDUCE)
        local.seconds["data_s"] = self._data_s
        for name, begin, end in self._intervals:
            local.seconds[name] += end.seconds_since(begin)
        local.seconds["blocked_s"], context.blocked_s = context.blocked_s, 0.0
        known_s = sum(local.seconds[name] for name in STEP_SECONDS)
        local.seconds["other_s"] = max(time.perf_counter() - self._began - known_s, 0.0)
        if layout.leads_cell:
            local.sample_digest = multiset_digest(np.concatenate(self._ids)) if self._ids else 0
            local.losses = [loss * size for loss, (_, size) in zip(losses, self._losses, strict=True)]
            local.small_squares = context.noise.small_squares(self.samples, self._loss_scale)
            local.micro_batches = len(local.small_squares)
        local.overflows = bool(has_overflowed)
        if layout.is_first:
            local.grad_norm = grad_norm
            local.stored_steps = context.telemetry.stored_steps if context.telemetry else 0
        return context.reducer.reduce(local)

    def _commit(self, totals: StepTotals, measured: Mapping[str, float]) -> None:
        setup = self._context.setup
        setup.worker.progress.enter(BETWEEN_STEPS)
        done = self.index + self.merged_steps
        row = StepRow(
            attempt=setup.attempt,
            step=self.index,
            merged_steps=self.merged_steps,
            epoch=self._shapes[0].epoch,
            samples=self._samples_after,
            step_samples=self.samples,
            world_size=setup.layout.world_size,
            cells=setup.layout.num_cells,
            lr=self.lr,
            time=time.time(),
            weights_digest=self._weights_digest(done),
            grad_norm=totals.grad_norm,
            applied=not totals.overflows,
            loss=totals.losses / self.samples,
            sample_digest=totals.sample_digest,
            logged=json.dumps({**totals.logged, **measured}),
            **totals.seconds,
        )
        if not math.isfinite(totals.grad_norm):
            self._report_overflow()
        self._boundary.committed(row, int(totals.stored_steps), totals.wants)
        if totals.overflows:
            self._report_skip(done)
        known = self._context.known_kinds
        setup.worker.progress.committed(done, time.perf_counter() - self._began, self._kinds <= known)
        known |= self._kinds

    def _report_overflow(self) -> None:
        """Report, once in a group, that compression may have made the gradient infinite. A single rank sends nothing."""
        context, compression = self._context, self._context.setup.job.gradient.compression
        if compression != "none" and context.setup.layout.num_cells > 1 and not context.has_overflowed:
            context.has_overflowed = True
            detail = f"gradient.compression={compression}"
            context.report(WarningEvent("gradient_overflow", detail, step=self.index + self.merged_steps))

    def _report_skip(self, done: int) -> None:
        """Report that the step was skipped, and warn if no step has been applied for long."""
        context, after = self._context, self._context.loss_scale.current
        context.report(SkipEvent(self._loss_scale, after.factor, step=done))
        if after.skipped_steps == LONG_SKIPPED_STEPS:
            context.report(WarningEvent("no_finite_gradients", str(after.skipped_steps), step=done))

    def _weights_digest(self, done: int) -> int | None:
        """Return the digest of the model's weights if the run is deterministic and a digest is due, else None."""
        setup = self._context.setup
        is_due = done // DIGEST_EVERY > self.index // DIGEST_EVERY or done == setup.plan.total_steps
        if not (setup.job.deterministic and is_due):
            return None
        pieces = self._context.live.held().pieces
        return additive_digest({name: piece for name, piece in pieces.items() if name.startswith(MODEL)})


def _kind(batch: Any, num_trainable: int) -> Kind:
    """Return the kind of a batch for a model with so many trainable parameters, whose number torch.compile takes for granted."""
    return (*(tuple(each.shape) for each in tensors_of(batch)), (num_trainable,))
