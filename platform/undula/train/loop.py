"""Training loop of a rank, from the newest state of the run to the end of the plan."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from undula.errors import UsageError
from undula.parallel.collectives import any_rank
from undula.recovery.progress import BETWEEN_STEPS
from undula.recovery.rank_snapshots import RankSnapshots, find_state
from undula.recovery.restore import Restored, Restorer
from undula.recovery.snapshot import folder_of
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.recovery.worker_state import LeaveGroup
from undula.state.events import Event, StartEvent, ValidationEvent, WarningEvent
from undula.state.goals import LOSS
from undula.telemetry.reporter import Telemetry
from undula.train.arithmetic import STATE, arithmetic_of, difference
from undula.train.boundary import StepBoundary
from undula.train.context import TrainContext
from undula.train.device_batches import DeviceBatches
from undula.train.learning_rate import rate_for
from undula.train.randomness import seed_between_steps
from undula.train.script_state import AfterStep
from undula.train.step import Step
from undula.train.step_reduction import exact_means
from undula.train.validation import Validation, ValidationFunction

LEAVE_EVERY_S = 0.2
"""Pause in seconds before ranks that were asked to leave during a validation look again whether the checkpoint in progress is complete."""


class TrainingLoop:
    """Yields the remaining steps of a run. Between steps it validates and saves whenever that is due.

    Args:
        context: State of the run on this rank.
        validate: Function that returns the means of a batch; None if the script does not validate.
        after_step: Function that is called after each step and its validation; None if the script works in its loop only.
    """

    def __init__(self, context: TrainContext, validate: ValidationFunction | None, after_step: AfterStep | None = None):
        self.boundary = StepBoundary(context)
        self._context = context
        self._restored: Restored | None = None
        self._has_loss = validate is not None
        self._after = after_step
        self._validation = self._make_validation(validate)

    @property
    def done(self) -> int:
        """Number of committed steps.

        Raises:
            UsageError: No state is restored yet.
        """
        if self._context.committed is None:
            raise UsageError("the loop over run.steps() has not begun; call this in the loop, after step.update()")
        return self._context.committed

    def stop(self, reason: str) -> None:
        """End the run after the step that was committed last."""
        self._context.results.stop(reason)

    def begin(self) -> Restored:
        """Restore the newest complete state and report the start of the attempt, unless this was done before."""
        if self._restored is None:
            self._restored = self._restore()
            self._begin(self._restored)
        return self._restored

    def steps(self) -> Iterator[Step]:
        """Restore the newest complete state, and yield the steps that follow it."""
        context, setup = self._context, self._context.setup
        worker = setup.worker
        restored = self.begin()
        start = restored.step
        try:
            worker.progress.begin(start)
            owed_since = context.script_state.owed_since
            is_saved = restored.is_checkpoint and owed_since is None
            if start == 0:
                self._validate(0)
            elif owed_since is not None:
                self._work(owed_since, start)
            if start and not is_saved:
                self._save_owed_best(start)
            index = start
            # A script with state of its own, but without `after_step`, can repeat its work up to the first batch.
            repeats = context.script_state.is_used and self._after is None
            self.boundary.settle(owed_since if repeats else None)
            while not self._ends(index):
                seed_between_steps(setup.job.plan.seed, "before the batches", index)
                step = Step(context, self.boundary, index)
                yield step
                if not step.updated:
                    raise UsageError(
                        f"step {index} ended without step.update(); call it after the loop over step.batches()"
                    )
                index += step.merged_steps
                self._end_step(step.index, index)
            if index == start and not is_saved:
                # The previous group committed the last step but was lost before it wrote the last checkpoint.
                self.boundary.settle(owed_since=None)
                self._save(start - 1, start)
            is_early = index < setup.plan.total_steps
            self.boundary.end(index, context.results.reason_to_stop(setup.job.stop) if is_early else "")
        except LeaveGroup:
            # The held state takes rows that are not stored yet to the next group. In a single process, there is no next group.
            self.boundary.close(wait=context.setup.worker.controller is None)
            raise
        except Exception:
            self.boundary.report_unfinished()  # before the reporter is closed
            raise
        finally:
            self.boundary.close()

    def _restore(self) -> Restored:
        context, setup = self._context, self._context.setup
        folder = folder_of(setup.job.run_url, setup.job.run_id)

        def begin(step: int) -> None:
            context.stream = context.samples.training(step)
            context.stream.open()
            context.batches = DeviceBatches(context.stream, setup.layout.device)

        restorer = Restorer(
            context.live,
            context.checkpoints,
            setup.plan_digest,
            setup.before.newest + 1,
            setup.layout,
            find=lambda: [
                each
                for each in find_state(folder, setup.plan_digest, setup.replicas, setup.layout)
                if setup.before.includes_state(*each.age)
            ],
            begin=begin,
            enter=setup.worker.enter,
        )
        held = setup.worker.held
        restored = restorer.restore(held if held and setup.before.includes_state(*held.age) else None)
        setup.worker.held = None
        return restored

    def _begin(self, restored: Restored) -> None:
        """Record the start of the attempt, start telemetry and snapshots, set the learning rate, and report the restored state."""
        context, setup = self._context, self._context.setup
        job, layout, start = setup.job, setup.layout, restored.step
        context.committed, context.committed_by = start, restored.attempt
        context.baseline.take()
        context.rows = list(restored.rows)
        if layout.is_first:
            context.checkpoints.begin(start)
            context.telemetry = Telemetry(setup.store, setup.attempt, setup.plan.total_steps, setup.publish)
            context.telemetry.repeat(restored.rows)
        self._report_start(restored)
        context.rate, change = rate_for(job.schedule, setup.plan, layout.num_cells, start, restored.values)
        context.rates.restore(restored.values)
        context.results.restore(restored.values)
        seed_between_steps(job.plan.seed, "after the update", start)  # for work that the script repeats
        context.script_state.restore(restored.values)
        if context.telemetry:
            context.telemetry.export_means(context.results.means)
        if change:
            context.report(change)
        if job.deterministic:
            self._compare_arithmetic(restored)
        for warning in context.warnings if start == 0 else ():
            context.report(warning)
        if start == 0 and context.rates.warning:
            context.report(WarningEvent("batch_rule", context.rates.warning))
        if start == 0 and context.rates.others:
            context.report(WarningEvent("other_rates", context.rates.others))
        if not self._has_loss and context.samples.has_validation:
            context.report(WarningEvent("no_validation"))
        if start == 0 and self._has_loss and not context.samples.has_validation:
            context.report(WarningEvent("no_validation_data"))
        if (every := job.checkpoint.snapshot_every_steps) != 0:
            folder = folder_of(job.run_url, job.run_id)
            writer = SnapshotWriter(folder, setup.plan_digest, setup.attempt, layout.local_rank, every)
            context.snapshots = RankSnapshots(context.live, writer, setup.replicas, layout, setup.worker)

    def _report_start(self, restored: Restored) -> None:
        context, layout = self._context, self._context.setup.layout
        for problem in restored.damaged.values():
            context.report(WarningEvent("checkpoint_skipped", problem, step=restored.step))
        origin, attempt = restored.origin or None, context.setup.attempt
        context.report(StartEvent(layout.world_size, attempt, origin, layout.num_cells, step=restored.step))

    def _compare_arithmetic(self, restored: Restored) -> None:
        """Warn if the ranks, or the group that computed the restored state, may produce other bits for the same computation."""
        layout = self._context.setup.layout
        known: list[Any] = [None] * layout.world_size
        dist.all_gather_object(
            known, arithmetic_of(layout.device, self._context.setup.job.compiled), group=layout.control
        )
        former = [restored.values[STATE]] if STATE in restored.values else []
        if found := difference([*former, *known]):
            self._context.report(WarningEvent("mixed_machines", found))

    def _end_step(self, before: int, done: int) -> None:
        """Validate, do the work of the script and save after `done` steps, whatever of these is due.

        Ranks that have agreed to leave do so before the validation and the work of the script, which the next group then does.
        """
        context = self._context
        validates = self._validation is not None and self._is_validation_due(before, done)
        has_work = validates or self._after is not None
        self.boundary.settle(owed_since=before if has_work else None)
        # Only now, because the group may have ended while the script worked, and its state would not be settled.
        context.setup.worker.enter(BETWEEN_STEPS)
        self.boundary.snapshot(done, is_whole_at_once=has_work)
        if has_work:
            if context.wants.leaves and not self._ends(done):
                self._save(before, done)
            self._work(before, done)
        if context.telemetry and self._validation is None and self._is_validation_due(before, done):
            context.telemetry.mean_loss(done)
        self._save(before, done)

    def _is_validation_due(self, before: int, done: int) -> bool:
        setup = self._context.setup
        return done == setup.plan.total_steps or _is_due(setup.job.validation.every_steps, before, done)

    def _work(self, before: int, done: int) -> None:
        """Validate if that is due after `done` steps, and let the script finish its work after them. The state then includes both.

        Raises:
            LeaveGroup: The ranks were asked to leave by some time. The next group validates.
        """
        context, setup = self._context, self._context.setup
        if self._is_validation_due(before, done):
            # A script with work of its own may have other weights in the model until that work.
            can_end_early = self._after is None and done < setup.plan.total_steps
            while not self._validate(done, can_end_early):
                if any_rank(not context.baseline.is_intact, setup.layout.control):
                    can_end_early = False
                    continue
                self.boundary.agree()
                self._save(before, done)  # leaves the group, unless a checkpoint is being written
                time.sleep(LEAVE_EVERY_S)
        if self._after is not None:
            seed_between_steps(setup.job.plan.seed, "after_step", done)
            results = context.results
            self._after(done, results.means if results.step == done else None)
        self.boundary.settle(owed_since=None)

    def _save(self, before: int, done: int) -> None:
        """Save the state after `done` steps if that is due, and leave the group if the ranks were asked to."""
        context = self._context
        spec = context.setup.job.checkpoint
        is_due, is_best = _is_due(spec.every_steps, before, done), context.results.is_best(spec.keep_best, done)
        self.boundary.save_and_leave(done, is_due, self._ends(done), is_best)

    def _ends(self, done: int) -> bool:
        """Return whether the run ends after `done` steps."""
        context = self._context
        job, plan = context.setup.job, context.setup.plan
        return done == plan.total_steps or bool(context.results.reason_to_stop(job.stop))

    def _save_owed_best(self, done: int) -> None:
        """Save the restored state if it is the best one and the previous group was lost, or left, before its checkpoint was committed."""
        if self._context.results.is_best(self._context.setup.job.checkpoint.keep_best, done) and not self._ends(done):
            self.boundary.save_best(done)

    def _make_validation(self, function: ValidationFunction | None) -> Validation | None:
        context, setup = self._context, self._context.setup
        if function is None or not context.samples.has_validation:
            return None
        return Validation(
            context.model,
            context.optimizer,
            function,
            setup.job,
            context.samples.validation_plan,
            context.samples.validation,
            setup.layout,
            setup.worker,
            context.baseline.put_back_buffers,
            equal_rounds=context.engine.capabilities.equal_rounds,
        )

    def _validate(self, done: int, can_end_early: bool = False) -> bool:
        """Validate the state after `done` steps. All ranks do the same.

        Args:
            done: Number of committed steps.
            can_end_early: Whether the validation ends early if its ranks are asked to leave by some time.

        Returns:
            Whether the validation was completed.
        """
        if self._validation is None:
            return True
        context, control = self._context, self._context.setup.layout.control
        found = self._validation.sums(can_end_early)
        context.setup.worker.enter(BETWEEN_STEPS)  # the other ranks may still validate
        if can_end_early and any_rank(found is None, control):
            return False
        assert found is not None
        self.add_validation(done, *exact_means(*found, control))
        return True

    def report(self, event: Event) -> None:
        """Report an event of the run. Only the events of rank 0 reach the ledger."""
        self._context.report(event)

    def add_validation(self, done: int, means: Mapping[str, float], samples: int) -> None:
        """Record the result of a validation after `done` steps. All ranks do the same.

        Raises:
            UsageError: A goal of the job is about another mean.
        """
        context = self._context
        for key, goal in context.setup.job.goals.items():
            if goal.metric not in means:
                raise UsageError(
                    f"{key} has metric {goal.metric!r}, but the validation function returns {sorted(means)}; set one of these, or return "
                    f"{goal.metric!r} as well"
                )
        context.results.add(done, means)
        others = {name: mean for name, mean in means.items() if name != LOSS}
        context.report(ValidationEvent(means[LOSS], samples, others, step=done))


def _is_due(every: int, before: int, done: int) -> bool:
    """Return whether steps `before` + 1 to `done` include one of every `every` steps."""
    return done // every > before // every
