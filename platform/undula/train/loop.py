"""Training loop of a rank, from the newest state of the run to the end of the plan."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from undula.errors import UsageError
from undula.parallel.collectives import any_rank
from undula.recovery.baseline import IN_LOOP, IN_WORK
from undula.recovery.live_state import LiveState
from undula.recovery.progress import BETWEEN_STEPS
from undula.recovery.restore import Restored
from undula.recovery.worker_state import LeaveGroup
from undula.state.events import ValidationEvent, WarningEvent
from undula.state.goals import LOSS, ValidationResults
from undula.train.attempt import Attempt, close_in_thread
from undula.train.boundary import StepBoundary
from undula.train.given import STATE, arithmetic_of
from undula.train.measurement import StepPhases
from undula.train.micro_batches import MicroBatches
from undula.train.model import watch_compilation_of
from undula.train.parts import ScriptParts
from undula.train.randomness import seed_between_steps
from undula.train.saver import StateSaver
from undula.train.script_state import AfterStep
from undula.train.script_variables import ScriptVariables, StateBeside
from undula.train.setup import RunSetup
from undula.train.step import Step
from undula.train.trained_model import TrainedModel
from undula.train.validation import Validation, ValidationFunction

LEAVE_EVERY_S = 0.2
"""Pause in seconds before ranks that were asked to leave during a validation look again whether the checkpoint in progress is complete."""


class TrainingLoop:
    """Yields the remaining steps of a run. Between steps it validates and saves whenever that is due.

    Args:
        setup: Parts of the run that the rank knows before it has a model.
        parts: What the script has given to the run.
        validate: Function that returns the means of a batch; None if the script does not validate.
        after_step: Function that is called after each step and its validation; None if the script works in its loop only.

    Attributes:
        attempt: What this attempt has committed and reports.
        saver: Storage of the run's state.
        boundary: Boundary between two steps.
        model: Model of the run.
    """

    def __init__(
        self,
        setup: RunSetup,
        parts: ScriptParts,
        validate: ValidationFunction | None = None,
        after_step: AfterStep | None = None,
    ):
        job, layout = setup.job, setup.layout
        self._setup, self._parts = setup, parts
        self._last = job.last_step(setup.plan)
        gathered = job.precision.compute if job.sharding.gather == "compute" else None
        self._arithmetic = arithmetic_of(layout.device, job.compiled, job.sharding.offload == "all", gathered)
        self._results = ValidationResults()
        self._means: Mapping[str, float] = {}
        """Means of the newest validation of this group, also of one before the first step; empty if there was none."""
        self.model = TrainedModel(job, setup.plan, layout, parts.engine, parts.model, parts.rates)
        parts.given.add_parts(self.model.added)
        self.attempt = Attempt(setup)
        live = LiveState(parts.model, parts.engine.optimizer, self._beside, parts.given.check)
        self.saver = StateSaver(setup, self.attempt, live)
        self.boundary = StepBoundary(setup, self.model, parts.state, self.attempt, self.saver)
        self._phases = StepPhases(setup.worker)
        self._batches: MicroBatches | None = None
        self._restored: Restored | None = None
        self._after = after_step
        self._variables = ScriptVariables(setup.worker, layout.is_first, [validate, after_step], parts.state.functions)
        self._validation = None
        if validate is not None and parts.samples.has_validation:
            self._validation = Validation(setup, self.model, validate, parts.samples)
        self._closing = ExitStack()
        for close in (self.saver.close, self.model.guard.close, watch_compilation_of(setup.worker.progress)):
            self._closing.callback(close)

    def _beside(self) -> dict[str, Any]:
        """Return the state of the run beside that of the model and the optimizer: pieces and values by name."""
        return {
            **self.model.values(),
            **self._results.values(),
            **self._parts.state.values(),
            **self._parts.given.values(),
            STATE: self._arithmetic,
        }

    @property
    def done(self) -> int:
        """Number of committed steps.

        Raises:
            UsageError: No state is restored yet.
        """
        if self.attempt.committed is None:
            raise UsageError("the loop over run.steps() has not begun; call this in the loop, after step.update()")
        return self.attempt.committed

    @property
    def means(self) -> Mapping[str, float]:
        """Means of the newest validation by name; empty before the first one."""
        return self._means or self._results.means

    def stop(self, reason: str) -> None:
        """End the run after the step that was committed last."""
        self._results.stop(reason)

    def begin(self) -> int:
        """Restore the newest complete state, unless this was done before, and return its number of committed steps."""
        if self._restored is None:
            self._restored = self.saver.restore(self._open)
            self._begin(self._restored)
        return self._restored.step

    def steps(self) -> Iterator[Step]:
        """Restore the newest complete state, and yield the steps that follow it."""
        setup, script_state = self._setup, self._parts.state
        start = self.begin()
        assert self._restored is not None
        try:
            setup.worker.progress.begin(start)
            if name := self._variables.begin():
                self.attempt.report(WarningEvent("state_in_script", name, step=start))
            owed_since = script_state.owed_since
            is_saved = self._restored.is_checkpoint and owed_since is None
            if start == 0:
                self._validate(0)
            elif owed_since is not None:
                self._work(owed_since, start)
            if start and not is_saved and self._is_best(start) and not self._ends(start):
                self.saver.save_best(start)  # the former group was lost, or left, before it had done so
            repeats = self.boundary.repeats_body = script_state.is_used and self._after is None
            self.boundary.settle(owed_since if repeats else None, IN_WORK)
            self.saver.first_snapshot(start)
            index = start
            beside = StateBeside(self.model.engine.module) if start == 0 and setup.layout.is_first else None
            while not self._ends(index):
                yield (step := self._step(index))
                if not step.updated:
                    raise UsageError(
                        f"step {index} ended without step.update(); call it after the loop over step.batches()"
                    )
                if beside and (changed := beside.changed()):
                    self.attempt.report(WarningEvent("state_beside_model", changed, step=step.index + 1))
                if beside and (unsaved := beside.unsaved()):
                    self.attempt.report(WarningEvent("buffer_not_saved", unsaved, step=step.index + 1))
                if beside and setup.job.ends_after is None:  # a smoke test checks this itself
                    self.saver.report_lack_of_room()
                index, beside = index + step.merged_steps, None
                self._variables.boundary()
                self.attempt.require_finite(is_end=self._ends(index))
                self._end_step(step.index, index)
            if index == start and not is_saved:
                # The previous group committed the last step but was lost before it wrote the last checkpoint.
                self.boundary.settle(None, IN_WORK)
                self._save(start - 1, start)
            is_early = index < setup.plan.total_steps
            self.boundary.end(self._results.reason_to_stop(setup.job.stop) if is_early else "")
        except LeaveGroup:
            # The held state takes rows that are not stored yet to the next group. In a single process, there is no next group.
            self.close(wait=setup.worker.controller is None)
            raise
        except UsageError:  # which says itself what the script must do otherwise
            raise
        except Exception:
            self.boundary.report_unfinished()  # before the reports end
            raise
        finally:
            self.close()

    def _step(self, index: int) -> Step:
        assert self._batches is not None
        seed_between_steps(self._setup.job.plan.seed, "before the batches", index)
        return Step(self._setup, self.model, self._batches, self.boundary, self._phases, index)

    def _open(self, step: int) -> None:
        """Begin to read the samples from a step on."""
        setup, reader = self._setup, self._parts.samples.training(step)
        reader.open()
        work_of = partial(setup.micro_batches, equal_rounds=self.model.engine.capabilities.equal_rounds)
        self._batches = MicroBatches(work_of, reader, setup.layout.device, setup.worker.enter)
        self._closing.callback(close_in_thread, reader.close)  # may wait for Ray Data's first block

    def _begin(self, restored: Restored) -> None:
        """Begin the attempt with the restored state, and report what the user should know about the run."""
        attempt, parts, start = self.attempt, self._parts, restored.step
        self.model.baseline.take()
        is_exact = self._setup.job.has_same_bits(on_gpus=self._setup.layout.device.type != "cpu")
        attempt.begin(restored, self._arithmetic, is_exact and self.model.engine.has_same_bits)
        changes = [*parts.given.resume(restored.values, parts.state.changes(restored.values), start)]
        change = self.model.restore({**restored.values, **parts.given.values()}, start)
        self._results.restore(restored.values)
        seed_between_steps(self._setup.job.plan.seed, "after the update", start)  # for work that the script repeats
        parts.state.restore(restored.values)
        if attempt.telemetry:
            attempt.telemetry.export_means(self._results.means)
        if change:
            attempt.report(change)
        is_same = attempt.compare_ranks(self._arithmetic, restored, parts.given)
        is_common = is_exact and is_same and self.model.engine.has_same_bits and not self._setup.worker.shares_state
        self.boundary.has_common_weights = is_common
        is_fixed = self._setup.plan.spec.batch == "fixed" and not changes
        if is_exact and is_same and is_fixed and self._setup.before.newest:
            attempt.compare_repeated()
        for warning in (*changes, *parts.warnings(start)):
            attempt.report(warning)
        self.saver.begin(restored)
        self.model.baseline.begin(restored.values, finds_changes=self._setup.worker.shares_state)

    def _end_step(self, before: int, done: int) -> None:
        """Validate, do the work of the script and save after `done` steps, whatever of these is due.

        Ranks that have agreed to leave do so before the validation and the work of the script, which the next group then does.
        """
        is_due = self._is_validation_due(before, done)
        has_work = (self._validation is not None and is_due) or self._after is not None
        self.boundary.settle(*((before, IN_LOOP) if has_work else (None, IN_WORK)))
        # Only now, because the group may have ended while the script worked, and its state would not be settled.
        self._setup.worker.enter(BETWEEN_STEPS)
        self.boundary.snapshot(done, is_whole_at_once=has_work)
        if has_work:
            if self.boundary.wants.leaves and not self._ends(done):
                self._save(before, done)
            self._work(before, done)
        if self.attempt.telemetry and self._validation is None and is_due:
            self.attempt.telemetry.mean_loss(done)
        self._save(before, done)

    def _is_validation_due(self, before: int, done: int) -> bool:
        every = self._setup.job.validation.every_steps
        return done >= self._last or _is_due(every, before, done)

    def _work(self, before: int, done: int) -> None:
        """Validate if that is due after `done` steps, and let the script finish its work after them. The state then includes both.

        Raises:
            LeaveGroup: The ranks were asked to leave by some time. The next group validates.
        """
        setup, results = self._setup, self._results
        if self._is_validation_due(before, done):
            # A script with work of its own may have other weights in the model until that work.
            can_end_early = self._after is None and done < self._last
            while not self._validate(done, can_end_early):
                if any_rank(not self.model.baseline.is_intact, setup.layout.control):
                    can_end_early = False
                    continue
                self.boundary.agree()
                self._save(before, done)  # leaves the group, unless a checkpoint is being written
                time.sleep(LEAVE_EVERY_S)
        if self._after is not None:
            seed_between_steps(setup.job.plan.seed, "after_step", done)
            self._after(done, results.means if results.step == done else None)
        self.boundary.settle(None, IN_WORK)

    def _save(self, before: int, done: int) -> None:
        """Save the state after `done` steps if that is due, and leave the group if the ranks were asked to."""
        is_due = _is_due(self._setup.job.checkpoint.every_steps, before, done)
        self.boundary.save_and_leave(done, is_due, self._ends(done), self._is_best(done))

    def _is_best(self, done: int) -> bool:
        return self._results.is_best(self._setup.job.checkpoint.keep_best, done)

    def _ends(self, done: int) -> bool:
        """Return whether the run ends after `done` steps."""
        return done >= self._last or bool(self._results.reason_to_stop(self._setup.job.stop))

    def _validate(self, done: int, can_end_early: bool = False) -> bool:
        """Validate the state after `done` steps if the script validates, and return whether the validation was completed.

        Args:
            done: Number of committed steps.
            can_end_early: Whether the validation ends early if its ranks are asked to leave by some time.
        """
        if self._validation is None:
            return True
        result = self._validation.means(can_end_early)
        if result is not None:
            self.add_validation(done, *result)
        return result is not None

    def add_validation(self, done: int, means: Mapping[str, float], samples: int) -> None:
        """Record the result of a validation after `done` steps. All ranks do the same.

        Raises:
            UsageError: A goal of the job is about another mean.
        """
        if problem := self._setup.job.problem_with_means(means):
            raise UsageError(problem)
        self._results.add(done, means)
        self._means = means
        others = {name: mean for name, mean in means.items() if name != LOSS}
        self.attempt.report(ValidationEvent(means[LOSS], samples, others, step=done))

    def hand_over(self) -> None:
        """Hand over the state of the last step boundary to the next worker group of this process, and close the loop."""
        self.boundary.hand_over()
        self.close(wait=not self._setup.worker.is_sound)

    def close(self, wait: bool = True) -> None:
        """End what watches optimizers, and the threads beside the loop. If `wait`, this returns once all reports are stored."""
        self._closing.close()
        self.attempt.close(wait)


def _is_due(every: int, before: int, done: int) -> bool:
    """Return whether steps `before` + 1 to `done` include one of every `every` steps."""
    return done // every > before // every
