"""Training loop of a rank, from the newest state of the run to the end of the plan."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from undula.errors import StorageError, UsageError
from undula.recovery.progress import BETWEEN_STEPS
from undula.recovery.rank_snapshots import RankSnapshots, find_state
from undula.recovery.restore import Restored, Restorer
from undula.recovery.snapshot import folder_of
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.recovery.worker_state import LeaveGroup
from undula.state.events import Event, StartEvent, ValidationEvent, WarningEvent
from undula.state.goals import LOSS
from undula.state.ledger import events_of, read_ledger
from undula.telemetry.reporter import Telemetry
from undula.train.arithmetic import STATE, arithmetic_of, difference
from undula.train.boundary import StepBoundary
from undula.train.context import TrainContext
from undula.train.device_batches import DeviceBatches
from undula.train.learning_rate import rate_for
from undula.train.script_state import AfterStep
from undula.train.step import Step
from undula.train.step_reduction import exact_means
from undula.train.validation import Validation, ValidationFunction


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
            if start == 0:
                self._validate(0)
            elif not restored.is_checkpoint:
                self._repeat_validation(restored)
                if not context.script_state.is_settled:
                    self._finish(start)
                self._save_owed_best(start)
            index = start
            while not self._ends(index):
                step = Step(context, self.boundary, index)
                yield step
                if not step.updated:
                    raise UsageError(
                        f"step {index} ended without step.update(); call it after the loop over step.batches()"
                    )
                index += step.merged_steps
                context.script_state.capture(is_settled=self._after is None)
                self.boundary.begin_snapshot(index)
                self._after_step(step.index, index)
            if index == start and not restored.is_checkpoint:
                # The previous group committed the last step but was lost before it wrote the last checkpoint.
                context.script_state.capture(is_settled=True)
                self._save(start - 1, start)
            is_early = index < setup.plan.total_steps
            self.boundary.end(index, context.results.reason_to_stop(setup.job.stop) if is_early else "")
        except LeaveGroup:
            # The held state takes rows that are not stored yet to the next group. In a single process, there is no next group.
            self.boundary.close(wait=context.setup.worker.controller is None)
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
        context.rows = list(restored.rows)
        if layout.is_first:
            context.checkpoints.begin(start)
            context.telemetry = Telemetry(
                setup.store, job.name, setup.attempt, start, setup.plan.total_steps, setup.publish
            )
            context.telemetry.repeat(restored.rows)
        self._report_start(restored)
        context.rate, change = rate_for(job.schedule, setup.plan, layout.num_cells, start, restored.values)
        context.rates.restore(restored.values)
        context.results.restore(restored.values)
        context.script_state.restore(restored.values)
        if context.telemetry:
            context.telemetry.export_means(context.results.means)
        if change:
            context.report(change)
        if job.deterministic:
            self._compare_arithmetic(restored)
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

    def _after_step(self, before: int, done: int) -> None:
        context = self._context
        context.setup.worker.enter(BETWEEN_STEPS)
        job, is_last = context.setup.job, done == context.setup.plan.total_steps

        if is_last or _is_due(job.validation.every_steps, before, done):
            if self._validation:
                self._validate(done)
            elif context.telemetry:
                context.telemetry.mean_loss(done)
        self._finish(done)
        self._save(before, done)

    def _finish(self, done: int) -> None:
        """Let the script finish its work after `done` steps, and take its state with that."""
        if self._after is None:
            return
        results = self._context.results
        self._after(done, results.means if results.step == done else None)
        self._context.script_state.capture(is_settled=True)

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

    def _repeat_validation(self, restored: Restored) -> None:
        """Validate the restored state if the previous group should have done so but was lost before."""
        setup, done = self._context.setup, restored.step
        before = done - (restored.rows[-1].merged_steps if restored.rows else 1)
        is_due = done == setup.plan.total_steps or _is_due(setup.job.validation.every_steps, before, done)
        if self._validation is None or not is_due:
            return
        known: list[dict[str, float] | None] = [None]
        if setup.layout.is_first:
            try:
                events = events_of(read_ledger(setup.store).events, ValidationEvent)
            except StorageError:  # a second validation of the same state does no harm
                events = []
            known = [next((event.means for event in reversed(events) if event.step == done), None)]
        dist.broadcast_object_list(known, group=setup.layout.control, group_src=0)
        # The script's work after the validation may need what it computed there.
        if known[0] is None or (self._after is not None and not self._context.script_state.is_settled):
            self._validate(done)
        else:
            self._context.results.add(done, known[0])

    def _make_validation(self, function: ValidationFunction | None) -> Validation | None:
        context, setup = self._context, self._context.setup
        if function is None or not context.samples.has_validation:
            return None
        return Validation(
            context.model,
            function,
            setup.job,
            context.samples.validation_plan,
            context.samples.validation,
            setup.layout,
            enter=setup.worker.enter,
            equal_rounds=context.engine.capabilities.equal_rounds,
        )

    def _validate(self, done: int) -> None:
        if self._validation is None:
            return
        context = self._context
        sums, samples = self._validation.sums()
        context.setup.worker.enter(BETWEEN_STEPS)  # the other ranks may still validate
        means, samples = exact_means(sums, samples, context.setup.layout.control)
        self.add_validation(done, means, samples)

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
