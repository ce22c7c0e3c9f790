"""The boundary between two steps, at which a step is committed, snapshots and checkpoints are taken, and a worker group can end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from undula.errors import UsageError
from undula.parallel.collectives import any_rank
from undula.parallel.device_clock import read_scalars
from undula.parallel.sharding import Settles
from undula.plan.plan import OptimizerStep
from undula.recovery.baseline import LATER, UPDATED
from undula.recovery.progress import BETWEEN_STEPS, HAND_OVER, MEMORY_BYTES_S, REDUCE, SAVE, SNAPSHOT, UPDATE
from undula.recovery.worker_state import LeaveGroup, Request
from undula.state.events import WarningEvent
from undula.train.attempt import Attempt
from undula.train.measurement import StepMeasurement, StepPhases
from undula.train.saver import LAST_PAUSES_S, StateSaver
from undula.train.script_state import ScriptState
from undula.train.setup import RunSetup
from undula.train.step_reduction import LocalStep, StepReducer, StepTotals, Wants
from undula.train.trained_model import TrainedModel

AGREE_EVERY_S = 0.5
"""Pause in seconds after which ranks that wait for the storage look whether they were asked to leave."""
DIGEST_EVERY = 10
"""Number of steps between digests of the weights in the ledger."""


class StepBoundary:
    """Commits steps, saves the state between steps, and hands it over to the next worker group.

    Args:
        setup: Parts of the run that the rank knows before it has a model.
        model: Model of the run.
        script_state: Values of the script that belong to the state.
        attempt: Attempt that commits the steps.
        saver: Storage of the state.

    Attributes:
        wants: Requests that the ranks agreed on at the last commit.
        is_save_asked: Whether the script has asked for a checkpoint since then.
        repeats_body: Whether the script repeats the work of its loop's body after an update, if the group ends in it. It does so up to the
            first batch of the next step if it has state of its own, and no `after_step`.
        has_common_weights: Whether all ranks have the same weights and state of the optimizer, bit for bit.
    """

    def __init__(
        self, setup: RunSetup, model: TrainedModel, script_state: ScriptState, attempt: Attempt, saver: StateSaver
    ):
        self._setup, self._worker = setup, setup.worker
        self._model = model
        self._script_state = script_state
        self._attempt = attempt
        self._saver = saver
        self._reducer = StepReducer(setup.layout.control)
        self._blocked_s = 0.0
        """Seconds for which checkpoints have blocked the training since the last step."""
        self.wants = Wants()
        self._done: Request | None = None
        """Request for a checkpoint that was carried out. It stays where it is, because another one may arrive there at any time."""
        self.is_save_asked = self.repeats_body = self.has_common_weights = False

    def begin_batches(self) -> None:
        """Begin the batches of a step, until when the script may repeat work that the former group had not finished."""
        if self._script_state.owed_since is not None:
            self.settle(None, LATER)

    def reduce(
        self, step: OptimizerStep, measured: StepMeasurement, phases: StepPhases, norm: Tensor, overflows: Tensor
    ) -> StepTotals:
        """Return the measurements of a step, reduced over all ranks, which commits it. On a GPU this waits for the backward pass.

        Args:
            step: The step.
            measured: Measurements of this rank.
            phases: Phases of this rank.
            norm: Norm of the step's gradient before clipping.
            overflows: Whether the gradient overflows on this rank.

        Raises:
            UsageError: Parameters changed before the update, or on some ranks only since the last one.
        """
        layout, guard = self._setup.layout, self._model.guard
        digest = self._model.baseline.weights() if self.has_common_weights else norm.new_zeros(())
        scalars = [norm, overflows, guard.moved, digest, *measured.losses]
        grad_norm, has_overflowed, moved, weights, *losses = read_scalars(scalars)
        if self._saver.snapshots and moved:
            self._saver.snapshots.discard()  # the last one may have been taken while parameters changed
        guard.check_moved(bool(moved))
        has_overflowed = self._settle(bool(has_overflowed))
        wants = self._wants()
        if self._saver.updates:
            assert self._attempt.committed is not None
            done = self._attempt.committed + step.merged_steps
            work = self._model.baseline.work
            self._saver.updates.record(self._attempt.committed, done, not has_overflowed, work)
        phases.enter(REDUCE)
        local = measured.local(losses)
        local.wants, local.overflows = wants, has_overflowed
        local.changes = self._model.baseline.work.changes
        local.settings = self._model.baseline.settings()
        local.weights = int(weights) or self._model.engine.changed_shards()
        local.seconds["blocked_s"], self._blocked_s = self._blocked_s, 0.0
        local.small_squares = self._model.small_squares(step.samples)
        local.micro_batches = len(local.small_squares)
        if layout.is_first:
            local.grad_norm = grad_norm
            local.stored_steps = self._attempt.telemetry.stored_steps if self._attempt.telemetry else 0
        totals = self._reducer.reduce(local)
        if not (totals.settings and totals.weights):
            what = (
                "the weights, their gradients or the optimizer's state"
                if totals.settings
                else "the optimizer's settings, what is frozen, or which modules are in evaluation mode (eval() and train())"
            )
            raise UsageError(
                f"the script has changed {what} on some workers only before the update of step {step.index}, so that their weights would "
                "differ; make the same change on all workers, whatever their rank"
            )
        return totals

    def _settle(self, overflows: bool) -> bool:
        """Agree on what the update of a sharded model needs from other ranks, so that a rank can take it although the commit breaks.

        Returns:
            Whether the gradient overflows: on this rank, or on any rank if the model is sharded.
        """
        if self._saver.updates is None:
            return overflows
        optimizer, control = self._model.optimizer, self._setup.layout.control
        if self._model.loss_scale.is_used:
            overflows = any_rank(overflows, control)
        if isinstance(optimizer, Settles) and not overflows:
            optimizer.settle()
        return overflows

    def _wants(self) -> Wants:
        """Return the requests of this rank for the boundary after the step that it is about to commit.

        This waits for the last snapshot, so that it is complete on all ranks once they have agreed on the step.
        """
        wants, snapshots = self._requested(), self._saver.snapshots
        if snapshots:
            self._worker.enter(SNAPSHOT)
            snapshots.wait()
            # What the script changes in shards between steps is in no record of updates, but in a snapshot.
            changes = self._saver.updates is not None and bool(self._model.baseline.work.habits)
            wants.snapshots, wants.sends = snapshots.wants(self._attempt.step_s, changes)
            wants.is_sending, wants.lacks_memory = snapshots.is_sending, snapshots.lacks_piece
        return wants

    def _requested(self) -> Wants:
        """Return the requests of the controller to this rank, and those that follow from the checkpoints so far."""
        request = self._worker.request
        return Wants(
            leaves=request.leaves,
            abandons=request.leaves and time.time() >= request.until,
            saves=request.saves and request is not self._done,
            owes_save=self._worker.owes_save or self.is_save_asked,
            has_saved=self._saver.checkpoints.has_finished_here,
        )

    @contextmanager
    def changing_state(self, steps: int, changes: int) -> Iterator[None]:
        """Surround the optimizer's step, and count `steps` more steps of the plan as committed after it.

        An exception inside may leave the state partly changed. Such a state is not handed over. No snapshot may be in progress.

        Args:
            steps: Number of steps of the plan.
            changes: What the script has changed on any rank since the former update, as `Work.changes` says it.
        """
        attempt = self._attempt
        # The step is committed, so this call may not raise because the group has ended.
        self._worker.progress.enter(UPDATE)
        committed, attempt.committed = attempt.committed, None
        assert committed is not None
        if self._saver.updates:
            self._saver.updates.committed()
        self._model.baseline.drop()
        yield
        attempt.committed, attempt.committed_by = committed + steps, self._setup.attempt
        self._model.baseline.updated(changes)
        # Otherwise, what the script does next is unknown until it asks for the next step. It could not repeat this work.
        if self.repeats_body:
            self.settle(committed, UPDATED)

    def committed(self, step: OptimizerStep, totals: StepTotals, lr: float, measured: dict[str, float]) -> None:
        """Record a committed step.

        Args:
            step: The step.
            totals: Measurements of the step.
            lr: Learning rate of the step.
            measured: Other values for the ledger, by name.
        """
        self._worker.progress.enter(BETWEEN_STEPS)
        attempt, saver, wants = self._attempt, self._saver, totals.wants
        saver.release()
        digest: int | None = None
        try:
            digest = saver.weights_digest() if self._is_digest_due(step) else None
        finally:  # the step is committed even if a rank with shards of the weights is lost now
            attempt.commit(step, totals, lr, measured, digest)
        self.wants, self.is_save_asked = wants, False
        request = self._worker.request
        if wants.saves and request == Request(saves=True):
            self._done = request
        if saver.snapshots and (news := saver.snapshots.agreed(step.done, wants.lacks_memory, wants.is_sending)):
            attempt.report(news)
        if wants.has_saved:
            saver.finish_saving()
        if totals.overflows:
            scale = self._model.loss_scale.current
            attempt.report_skip(step.done, measured.get("loss_scale", 1.0), scale.factor, scale.skipped_steps)

    def _is_digest_due(self, step: OptimizerStep) -> bool:
        return step.done // DIGEST_EVERY > step.index // DIGEST_EVERY or step.done == self._setup.plan.total_steps

    def settle(self, owed_since: int | None, place: int) -> None:
        """Take the state as it is now as that which this group could hand over.

        Args:
            owed_since: Number of committed steps before those whose validation or `after_step` is still to be done; None if all is done.
            place: Place to which the script has come since the update, of those in `recovery.baseline`.

        Raises:
            UsageError: A parameter has another dtype or shape than at the beginning.
        """
        self._model.guard.check_forms()
        self._script_state.capture(owed_since)
        self._model.baseline.take(place)
        if self._saver.updates:
            assert self._attempt.committed is not None
            self._saver.updates.note_place(self._attempt.committed, self._model.baseline.work)

    def snapshot(self, done: int, is_whole_at_once: bool) -> None:
        """Begin a snapshot of the state after `done` steps if one is due.

        Args:
            done: Number of committed steps.
            is_whole_at_once: Whether to wait until the snapshot is complete, because code of the script follows that may change weights.
        """
        if self.wants.snapshots and not self._attempt.is_lost:
            self._saver.snapshot(done, self.wants.sends and not self.wants.is_sending, is_whole_at_once)

    def agree(self) -> None:
        """Let the ranks agree anew on their requests for the current boundary. All ranks must call this."""
        self.wants = self._reducer.reduce(LocalStep(wants=self._requested())).wants
        if self.wants.has_saved:
            self._saver.finish_saving()

    def save_and_leave(self, done: int, checkpoint_is_due: bool, ends: bool, is_best: bool) -> None:
        """Begin a checkpoint after `done` steps if one is due, and leave the group if the ranks were asked to. All ranks do the same.

        A checkpoint that is due while another one is being written begins once that has ended, so that it does not block the training.
        Ranks that were asked to leave begin no checkpoint, unless they were asked for it: they leave once none is being written, and the
        next group begins the one that is due.

        The checkpoint of the best state is committed before the next step, because later states do not have its weights. Ranks that leave
        hand this state over, and the next group saves it before its first step.

        Args:
            done: Number of committed steps.
            checkpoint_is_due: Whether the interval of checkpoints has passed.
            ends: Whether this was the last step of the run.
            is_best: Whether the state is the best one so far, and is to be kept.

        Raises:
            LeaveGroup: The group ends at this boundary.
        """
        worker, wants, saver = self._worker, self.wants, self._saver
        began = time.perf_counter()
        leaves, is_saving = wants.leaves and not ends, saver.is_saving
        worker.owes_save = checkpoint_is_due or wants.saves or wants.owes_save
        if is_best and not leaves and not ends:
            saver.save_best(done)
        elif self._attempt.is_lost:
            pass  # the last checkpoint has finite weights
        elif ends or (leaves and wants.saves) or (worker.owes_save and not leaves and not is_saving):
            saver.save(done)
        if leaves and (wants.saves or wants.abandons or not is_saving):
            self._leave()
        worker.enter(BETWEEN_STEPS)
        self._blocked_s += time.perf_counter() - began

    def _leave(self) -> None:
        """End the group. All ranks must call this at the same step boundary."""
        wants, saver = self.wants, self._saver
        if wants.abandons and not wants.saves and saver.is_saving:
            saver.abandon()
        saver.finish_saving()
        raise LeaveGroup

    def report_unfinished(self) -> None:
        """Report that the group ends with a state that cannot be handed over, if that is so."""
        committed = self._attempt.committed
        if committed and self._attempt.telemetry and not self._model.baseline.is_intact:
            self._attempt.report(WarningEvent("unfinished_work", str(committed - 1), step=committed))

    def hand_over(self) -> None:
        """Keep the state of the last step boundary for the next worker group of this process, if that state is intact."""
        worker, committed = self._worker, self._attempt.committed
        # Otherwise this group has no intact state of a committed step, and the process keeps what it held before.
        self.report_unfinished()
        # A process of a sharded model keeps what it held for the former group until this one has committed a step.
        if committed and self._model.baseline.is_intact and worker.held is None:
            self._model.baseline.put_back()
            self._model.engine.free_gradients()
            worker.held = self._saver.held(committed, lambda: worker.progress.enter(HAND_OVER))
            # The thread of the snapshots may still be copying one, and sending a replica of it.
            allowed_s = 2 * worker.held.state.bytes / MEMORY_BYTES_S if self._saver.snapshots else 0.0
            worker.progress.enter(HAND_OVER, allowed_s)

    def end(self, reason: str) -> None:
        """End the run after the last step, or for a reason before it. If the storage fails, the last checkpoint is tried again.

        Raises:
            LeaveGroup: The ranks were asked to leave meanwhile. The next group saves.
            RunError: The last checkpoint could not be written.
        """
        saver, done = self._saver, self._attempt.committed
        assert done is not None
        error = saver.finish_saving(is_last=True)
        for pause_s in LAST_PAUSES_S if self._setup.job.ends_after is None else ():
            if error is None:
                break
            self._wait(pause_s)
            saver.save(done)
            error = saver.finish_saving(is_last=True)
        saver.end(error)
        self._attempt.end(reason)

    def _wait(self, pause_s: float) -> None:
        """Wait until the last checkpoint is tried again, or leave the group if the ranks are asked to. All ranks must call this.

        Raises:
            LeaveGroup: The group ends.
        """
        for _ in range(round(pause_s / AGREE_EVERY_S)):
            self._worker.enter(SAVE)
            time.sleep(AGREE_EVERY_S)
            self.agree()
            if self.wants.leaves:
                raise LeaveGroup
