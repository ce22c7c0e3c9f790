"""One optimizer step as the user's loop sees it: micro-batches, their backward passes, and the commit point."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from undula.data.rows import Batch
from undula.data.streams import SampleStream
from undula.parallel.device_clock import Mark, mark_on
from undula.plan.keys import multiset_digest
from undula.plan.plan import MicroBatch
from undula.recovery.handover import process
from undula.state.model_state import weights_digest
from undula.state.records import StepRow
from undula.train.randomness import seed_micro_batch
from undula.train.step_reduction import LocalStats, StepStats

if TYPE_CHECKING:
    from undula.train.run import Run

STEP_SECONDS = ("data_s", "compute_s", "communication_s")
DIGEST_EVERY = 10
"""Steps between digests of the weights in the ledger of a deterministic run."""


class Step:
    """One optimizer step.

    Attributes:
        index: of the plan's steps, counted from 0 over the whole run; the first, where an elastic batch takes several as one.
        samples: that it has.
        lr: learning rate of the schedule at this step, for a group whose own rate is the base rate.
    """

    def __init__(self, run: "Run", stream: SampleStream, index: int):
        self._run = run
        self._stream = stream
        self._began = time.perf_counter()
        self._data_s = 0.0
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._losses: list[tuple[Tensor, int]] = []
        self._local = LocalStats()
        self._weight = 0
        self._in_micro_batch: Mark | None = None
        self._has_begun = self._is_in_batch = self._has_ended = self._is_last = False
        self.index = index
        self.span = run.plan.merged_steps(index, run.world_size)
        self._shapes = [run.plan.step(each) for each in range(index, index + self.span)]
        self.samples = sum(shape.samples for shape in self._shapes)
        self._samples_after = self._shapes[0].samples_before + self.samples
        self._rate = run._rate.at(self._samples_after, self.samples, self.span, run._meter.measured)
        self.lr = run.base_lr * self._rate.lr
        self.updated = False

    def batches(self) -> Iterator[Batch]:
        """The micro-batches of this rank's virtual workers; call backward() once for each."""
        run = self._run
        assert run._model is not None
        if self._has_begun:
            raise RuntimeError("step.batches() was called twice: a step's samples come once")
        self._has_begun = True
        steps = range(self.index, self.index + self.span)
        work = run.plan.work(steps, run._virtual_workers)
        # Without a share in a short step, two rows of weight zero run instead: the ranks' collectives must match, and some layers,
        # BatchNorm among them, cannot train on one row.
        rounds = run.plan.rounds(steps, run.world_size) if run._engine.rounds_must_match else 1
        work += [MicroBatch(self.index, run._virtual_workers[0], 0, 0)] * (rounds - len(work))
        run._buffers.begin_step()
        run._engine.begin_step(len(work))
        run._meter.begin_step(self.index, self.span)
        for place, each in enumerate(work):
            batch = self._next_batch(each.virtual_worker, each.samples)
            self._is_last = place == len(work) - 1
            run._engine.before_micro_batch(run._model, is_last=self._is_last)
            run._buffers.begin_micro_batch()
            seed_micro_batch(run._job.plan.seed, each.step, each.virtual_worker, each.number)
            self._micro_batch, self._weight = each, each.samples
            self._is_in_batch = True
            self._in_micro_batch = mark_on(run.device)
            process.enter("compute")
            yield batch
            self._is_in_batch = False
            if self._in_micro_batch is not None:
                raise RuntimeError("a batch was left without step.backward(loss)")
        self._has_ended = True

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of the current batch.

        Args:
            loss: mean over the batch's samples, a scalar.
        """
        run = self._run
        begin, self._in_micro_batch = self._in_micro_batch, None
        if begin is None:
            raise RuntimeError("step.backward(loss) goes once into each turn of `for batch in step.batches()`")
        if self._is_last:
            process.enter("reduce")
        run._meter.begin_backward()
        (loss * (run._loss_scale * self._weight / self.samples)).backward()  # type: ignore[no-untyped-call]
        run._meter.end_backward(self._weight)
        end = mark_on(run.device)
        ready = run._engine.gradients_ready or end
        self._spans += [("compute_s", begin, ready), ("communication_s", ready, end)]
        self._losses.append((loss.detach(), self._weight))
        run._engine.after_micro_batch(self._micro_batch)
        run._buffers.end_micro_batch(self._weight)

    def log(self, **values: float | Tensor) -> None:
        """Record values in the ledger, averaged over the step's samples: of the current batch, or of the rank outside of one."""
        weight = float(self._weight if self._is_in_batch else sum(size for _, size in self._losses))
        for name, value in values.items():
            total, weights = self._local.logged.get(name, (0.0, 0.0))
            self._local.logged[name] = (total + float(value) * weight, weights + weight)

    def update(self) -> None:
        """Clip, step the optimizer along the schedule, and commit the step."""
        run = self._run
        if not self._has_ended:
            raise RuntimeError(
                "step.update() comes after the loop over step.batches(), all of them: each is part of the step"
            )
        assert run._model is not None
        assert run._optimizer is not None
        process.enter("reduce")
        begin = mark_on(run.device)
        run._engine.end_step(self.samples)
        if run._buffers.is_needed:
            run._buffers.end_step(self.samples)
        self._spans.append(("communication_s", begin, mark_on(run.device)))
        self._whole_square = run._meter.whole_square()
        if run._job.gradient.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(run._model.parameters(), run._job.gradient.max_norm)
        run._group_rates.set(run._optimizer, self._rate)
        stats = self._reduced()  # the commit point: where a rank is lost up to here, the others stand before the step
        with run._changing_state(self.span):
            run._optimizer.step()
            noise = run._meter.keep(stats.norms, self._rate.clock)
        run._optimizer.zero_grad(set_to_none=True)
        self._commit(stats, {} if noise is None else {"noise_scale": noise})
        self.updated = True

    def _next_batch(self, virtual_worker: int, size: int) -> Batch:
        process.enter("data")
        began = time.perf_counter()
        samples = self._stream.take(virtual_worker, size) if size else self._stream.any_rows(2)
        if size:
            self._local.sample_digest += multiset_digest(samples.ids)
        device = self._run.device
        batch = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in samples.batch.items()
        }
        self._data_s += time.perf_counter() - began
        return batch

    def _reduced(self) -> StepStats:
        """What the step was, over all ranks. On a GPU this waits for the backward pass."""
        run = self._run
        losses = torch.stack([loss.double() * size for loss, size in self._losses]).tolist()
        seconds = self._local.seconds
        seconds["data_s"] = self._data_s
        for name, begin, end in self._spans:
            seconds[name] += end.seconds_since(begin)
        seconds["blocked_s"], run._blocked_s = run._blocked_s, 0.0
        seconds["other_s"] = max(time.perf_counter() - self._began - sum(seconds[name] for name in STEP_SECONDS), 0.0)
        self._local.losses = losses
        self._local.sample_digest %= 2**64
        self._local.small_squares = run._meter.small_squares(self.samples)
        self._local.whole_square = 0.0 if self._whole_square is None else float(self._whole_square)
        self._local.stored_steps = run._telemetry.stored_steps if run._telemetry else 0
        self._local.asked = run._wishes()
        return run._reducer.reduce(self._local, self.samples)

    def _commit(self, stats: StepStats, measured: Mapping[str, float]) -> None:
        run = self._run
        assert run._model is not None
        process.progress.enter("other")
        done = self.index + self.span
        is_digested = done // DIGEST_EVERY > self.index // DIGEST_EVERY or done == run.plan.total_steps
        digest = weights_digest(run._model) if run._job.deterministic and is_digested else None
        row = StepRow(
            attempt=run._attempt,
            step=self.index,
            merged_steps=self.span,
            epoch=self._shapes[0].epoch,
            samples=self._samples_after,
            step_samples=self.samples,
            world_size=run.world_size,
            lr=self.lr,
            time=time.time(),
            weights_digest=digest,
            loss=stats.loss,
            sample_digest=stats.sample_digest,
            logged=json.dumps({**stats.logged, **measured}),
            **stats.seconds,
        )
        run._committed(row, stats.stored_steps, stats.asked)
        process.progress.committed(done, time.perf_counter() - self._began)
