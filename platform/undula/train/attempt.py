"""What one attempt of a run, from the start of a worker group to its end, has committed on a rank, and what it reports."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from json import dumps
from typing import Any

import torch
import torch.distributed as dist

from undula.errors import RunError, UsageError
from undula.plan.plan import OptimizerStep
from undula.recovery.restore import Restored
from undula.state.events import EndEvent, Event, MemoryEvent, SkipEvent, StartEvent, WarningEvent
from undula.state.records import StepRow
from undula.telemetry.reporter import Telemetry
from undula.train.given import STATE, Arithmetic, Given, difference
from undula.train.measurement import RepeatedSteps
from undula.train.setup import RunSetup
from undula.train.step_part import LONG_SKIPPED_STEPS
from undula.train.step_reduction import StepTotals

MEASURED_STEPS = 3
"""Number of steps of a group after which its memory is reported: the first update makes the state of the optimizer, and later steps take
their memory beside it."""


class Attempt:
    """Committed steps of an attempt on a rank, whose reports go to the ledger.

    Args:
        setup: Parts of the run that the rank knows before it has a model.

    Attributes:
        committed: Number of committed steps; None before the state is restored, and while the optimizer changes it.
        committed_by: Number of the attempt that committed the last of these steps. A state has the age under which it was committed,
            because this attempt may fail before it has recorded that it begins.
        telemetry: Reports of the attempt; None on other ranks than the first, before the attempt begins, and after its end.
        rows: Rows of the ledger that may not have reached storage.
        step_s: Duration of the last step in seconds.
        non_finite_steps: Number of last steps whose gradient was not finite, but with which the optimizer has updated the weights.
    """

    def __init__(self, setup: RunSetup):
        self._setup = setup
        self.telemetry: Telemetry | None = None
        self._ended: Telemetry | None = None
        """Reports that have ended, which still take the events of what a script does after its last step."""
        self._has_overflowed = False
        """Whether the attempt has reported that the compression of gradients may have made them infinite."""
        self._has_ended = False
        self._repeated: RepeatedSteps | None = None
        self._num_commits = 0
        """Number of steps that this attempt has committed."""
        self.committed: int | None = None
        self.committed_by = 0
        self.rows: tuple[StepRow, ...] = ()
        self.step_s = 0.0
        self.non_finite_steps = 0

    def begin(self, restored: Restored, arithmetic: Arithmetic, same_bits: bool) -> None:
        """Begin with a restored state, and report the start.

        Args:
            restored: The state.
            arithmetic: Properties of this process.
            same_bits: Whether the run has the same bits at any number of workers.
        """
        setup, layout = self._setup, self._setup.layout
        self.committed, self.committed_by, self.rows = restored.step, restored.attempt, restored.rows
        if layout.is_first:
            self.telemetry = Telemetry(setup.store, setup.attempt, setup.plan.total_steps, setup.publish)
            self.telemetry.repeat(restored.rows)
        for problem in restored.damaged.values():
            self.report(WarningEvent("checkpoint_skipped", problem, step=restored.step))
        origin = restored.origin or None
        cells, world_size = layout.num_cells, layout.world_size
        bits = same_bits, dict(arithmetic)
        self.report(
            StartEvent(world_size, setup.attempt, origin, cells, *bits, cores=_usable_cores(), step=restored.step)
        )

    def compare_ranks(self, own: Arithmetic, restored: Restored, given: Given) -> bool:
        """Warn if the ranks, or the group that computed the restored state, may produce other bits for the same computation.

        Returns:
            Whether they produce the same bits.

        Raises:
            UsageError: The script has given other settings on one rank than on another.
        """
        layout = self._setup.layout
        known: list[Any] = [None] * layout.world_size
        dist.all_gather_object(known, (own, given.digest), group=layout.control)
        if len({digest for _, digest in known}) > 1:
            records: list[Any] = [None] * layout.world_size
            dist.all_gather_object(records, given.record, group=layout.control)
            rank = next(rank for rank, (_, digest) in enumerate(known) if digest != known[0][1])
            raise UsageError(replace(given, record=records[0]).gap_to(rank, records[rank]))
        gap = difference([arithmetic for arithmetic, _ in known])
        if gap is None and STATE in restored.values:
            gap = difference([restored.values[STATE], own], ("in the restored state", "now"))
        if gap:
            self.report(WarningEvent("mixed_machines", gap))
        return gap is None

    def compare_repeated(self) -> None:
        """Compare the losses of the following steps with those of earlier attempts from now on, because they must be the same."""
        if self.telemetry:
            assert self.committed is not None
            self._repeated = RepeatedSteps(self._setup.store, self._setup.before, self.committed)

    def report(self, event: Event) -> None:
        """Report an event of the run. Only the events of rank 0 reach the ledger."""
        if telemetry := self.telemetry or self._ended:
            telemetry.event(event)

    def commit(
        self,
        step: OptimizerStep,
        totals: StepTotals,
        lr: float,
        measured: dict[str, float],
        weights_digest: int | None,
    ) -> None:
        """Record a committed step.

        Args:
            step: The step.
            totals: Measurements of the step.
            lr: Learning rate of the step.
            measured: Other values for the ledger, by name.
            weights_digest: Digest of the model's weights; None if none is due.
        """
        setup = self._setup
        row = StepRow(
            attempt=setup.attempt,
            step=step.index,
            merged_steps=step.merged_steps,
            epoch=step.epoch,
            samples=step.samples_after,
            step_samples=step.samples,
            world_size=setup.layout.world_size,
            cells=setup.layout.num_cells,
            lr=lr,
            time=time.time(),
            weights_digest=weights_digest,
            grad_norm=totals.grad_norm,
            applied=not totals.overflows,
            loss=totals.losses / step.samples,
            sample_digest=totals.sample_digest,
            logged=dumps({**totals.logged, **measured}),
            **totals.seconds,
        )
        if not math.isfinite(totals.grad_norm) and not totals.overflows:
            self._report_overflow(step.done)
        self._count_non_finite(step, totals)
        self.rows = (*(former for former in self.rows if former.step >= int(totals.stored_steps)), row)
        self.step_s = row.seconds
        if self.telemetry:
            self.telemetry.step(row)
        self._report_gap(self._repeated.difference(row) if self._repeated else None, step.done)
        self._num_commits += 1
        if self._num_commits == MEASURED_STEPS:
            self._report_memory(step.done)

    def _report_gap(self, gap: str | None, done: int) -> None:
        """Report how a repeated step differs from what it was before, if it does."""
        if gap:
            self.report(WarningEvent("repeated_steps_differ", gap, step=done))

    def _report_memory(self, done: int) -> None:
        """Report the peak memory of this rank, with a GPU or in a smoke test."""
        device = self._setup.layout.device
        on_gpu: tuple[float, ...] = ()
        if device.type == "cuda":
            on_gpu = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        if on_gpu or self._setup.job.ends_after is not None:
            self.report(MemoryEvent(_peak_resident_bytes(), *on_gpu, step=done))

    def _count_non_finite(self, step: OptimizerStep, totals: StepTotals) -> None:
        if math.isfinite(totals.grad_norm) or totals.overflows:
            self.non_finite_steps = 0
            return
        if self.non_finite_steps == 0 and self._setup.job.checkpoint.max_non_finite_steps is not None:
            detail = f"{totals.grad_norm} in step {step.index}, with a loss of {totals.losses / step.samples:g}"
            self.report(WarningEvent("non_finite_gradient", detail, step=step.done))
        self.non_finite_steps += step.merged_steps

    @property
    def is_lost(self) -> bool:
        """Whether the weights are probably not finite, so that no checkpoint of them is of use."""
        return self.non_finite_steps > 0 and self._setup.job.checkpoint.max_non_finite_steps is not None

    def require_finite(self, is_end: bool) -> None:
        """Check that the last gradients were finite, or that there were few others in a row.

        Args:
            is_end: Whether the run would end now. Its last state must be of use.

        Raises:
            RunError: They were not.
        """
        most = self._setup.job.checkpoint.max_non_finite_steps
        if most is not None and self.non_finite_steps > (0 if is_end else most):
            assert self.committed is not None
            raise RunError(
                f"the gradient has not been finite since step {self.committed - self.non_finite_steps}, so that the weights are lost; "
                "lower schedule.base_lr, set gradient.max_norm, or look at the samples of that step, and submit the run again: it "
                "continues with the last checkpoint before that step"
            )

    def end(self, reason: str) -> None:
        """Report the end of the run after the last step, or for a reason before it."""
        self._has_ended = True
        self._report_gap(self._repeated.last_difference() if self._repeated else None, self.committed or 0)
        self.report(EndEvent(reason, step=self.committed or 0))

    def require_end(self) -> None:
        """Check, when the script has returned, that the run has ended. Other ranks would wait for one that returns alone.

        Raises:
            UsageError: It has not.
        """
        if not self._has_ended:
            done, total, rank = self.committed or 0, self._setup.plan.total_steps, self._setup.layout.rank
            raise UsageError(
                f"the script ended after {done} of {total} steps on rank {rank}; go through the loop over run.steps() to its end on every "
                "rank, also after run.stop(reason), and set plan.max_steps for a shorter training"
            )

    def report_skip(self, done: int, before: float, after: float, skipped_steps: int) -> None:
        """Report that a step was skipped, and warn if no step has been applied for long.

        Args:
            done: Number of committed steps.
            before: Loss scale of the step.
            after: Loss scale of the next step.
            skipped_steps: Number of steps in a row that were skipped.
        """
        self.report(SkipEvent(before, after, step=done))
        if skipped_steps == LONG_SKIPPED_STEPS:
            self.report(WarningEvent("no_finite_gradients", str(skipped_steps), step=done))

    def _report_overflow(self, done: int) -> None:
        """Report, once in a group, that compression may have made the gradient infinite."""
        if self._setup.job.gradient.compression == "fp16" and not self._has_overflowed:
            self._has_overflowed = True
            self.report(WarningEvent("gradient_overflow", "gradient.compression=fp16", step=done))

    def flush(self) -> None:
        """Write all previous reports to storage.

        Raises:
            StorageError: The storage cannot be written to.
        """
        if self.telemetry:
            self.telemetry.flush()

    def close(self, wait: bool) -> None:
        """End the reports. If `wait`, this returns once all of them are stored."""
        telemetry, self.telemetry = self.telemetry, None
        self._ended = telemetry or self._ended
        if telemetry and wait:
            telemetry.close()
        elif telemetry:
            close_in_thread(telemetry.close)


def _usable_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")  # which macOS lacks
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _peak_resident_bytes() -> int:
    import resource  # which Windows lacks

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def close_in_thread(close: Callable[[], None]) -> None:
    """Close something that may wait, which must not delay the next worker group."""
    threading.Thread(target=close, name="undula-close", daemon=True).start()
