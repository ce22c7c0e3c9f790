"""The boundary between two steps, at which a step is committed, snapshots and checkpoints are taken, and a worker group can end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from undula.errors import StorageError, SupersededError
from undula.recovery.progress import (
    BETWEEN_STEPS,
    HAND_OVER,
    MEMORY_BYTES_S,
    SAVE,
    SNAPSHOT,
    STORAGE_BYTES_S,
    UPDATE,
)
from undula.recovery.replica import state_bytes
from undula.recovery.snapshot import find_snapshots, folder_of, packed, parsed
from undula.recovery.worker_state import HeldState, LeaveGroup, Request
from undula.state.events import EndEvent, WarningEvent
from undula.state.pieces import RankState
from undula.state.records import StepRow
from undula.train.context import TrainContext
from undula.train.script_state import is_settled
from undula.train.step_reduction import LocalStep, Wants

BEST_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses in seconds after which the checkpoint of the best state is written again if the storage has failed."""


class StepBoundary:
    """Commits steps, saves the state between steps, and hands it over to the next worker group.

    Args:
        context: State of the run on this rank.
    """

    def __init__(self, context: TrainContext):
        self._context = context
        self.is_save_asked = False
        """Whether the script has asked for a checkpoint since the last step was committed."""

    def wants(self) -> Wants:
        """Return the requests of this rank for the boundary after the step that it is about to commit.

        This waits for the last snapshot, so that it is complete on all ranks once they have agreed on the step.
        """
        context = self._context
        wants, snapshots = self._requested(), context.snapshots
        if snapshots:
            context.setup.worker.enter(SNAPSHOT)
            snapshots.wait()
            wants.snapshots, wants.sends = snapshots.wants(context.step_s)
            wants.is_sending, wants.lacks_memory = snapshots.is_sending, snapshots.lacks_piece
        return wants

    def _requested(self) -> Wants:
        """Return the requests of the controller to this rank, and those that follow from the checkpoints so far."""
        worker = self._context.setup.worker
        request = worker.request
        return Wants(
            leaves=request.leaves,
            abandons=request.leaves and time.time() >= request.until,
            gives=request.gives,
            gives_all=request.gives_all,
            saves=request.saves,
            owes_save=worker.owes_save or self.is_save_asked,
            has_saved=self._context.checkpoints.has_finished_here,
        )

    @contextmanager
    def changing_state(self, steps: int) -> Iterator[None]:
        """Surround the optimizer's step, and count `steps` more steps of the plan as committed after it.

        An exception inside may leave the state partly changed. Such a state is not handed over. No snapshot may be in progress.
        """
        context = self._context
        # The step is committed, so this call may not raise because the group has ended.
        context.setup.worker.progress.enter(UPDATE)
        committed, context.committed = context.committed, None
        assert committed is not None
        context.baseline.drop()
        yield
        context.committed, context.committed_by = committed + steps, context.setup.attempt
        # What a script without state of its own does next is unknown until it asks for the next step. It could not repeat this work.
        if context.script_state.is_used:
            self.settle(owed_since=committed)

    def committed(self, row: StepRow, stored_steps: int, wants: Wants) -> None:
        """Record a committed step."""
        context = self._context
        worker, snapshots = context.setup.worker, context.snapshots
        context.rows = [*(each for each in context.rows if each.step >= stored_steps), row]
        context.wants = wants
        self.is_save_asked = False
        if wants.saves and worker.request == Request(saves=True):
            worker.request = Request()
        context.step_s = row.seconds
        if context.telemetry:
            context.telemetry.step(row)
        if snapshots and (news := snapshots.agreed(row.done, wants.lacks_memory, wants.is_sending)):
            context.report(news)
        if wants.has_saved:
            self.finish_saving()

    def settle(self, owed_since: int | None) -> None:
        """Take the state as it is now, when the loop's body has ended its work on a step, as that which this group could hand over.

        Args:
            owed_since: Number of committed steps before those whose validation or `after_step` is still to be done; None if all is done.
        """
        self._context.script_state.capture(owed_since)
        self._context.baseline.take()

    def snapshot(self, done: int, is_whole_at_once: bool) -> None:
        """Begin a snapshot of the state after `done` steps if one is due.

        Args:
            done: Number of committed steps.
            is_whole_at_once: Whether to wait until the snapshot is complete, because code of the script follows that may change weights.
        """
        context, wants = self._context, self._context.wants
        if context.snapshots and wants.snapshots:
            context.snapshots.begin(done, context.rows, wants.sends and not wants.is_sending)
            if is_whole_at_once:
                context.setup.worker.enter(SNAPSHOT)
                context.snapshots.wait()

    def agree(self) -> None:
        """Let the ranks agree anew on their requests for the current boundary. All ranks must call this."""
        context = self._context
        context.wants = context.reducer.reduce(LocalStep(wants=self._requested())).wants
        if context.wants.has_saved:
            self.finish_saving()

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
        context, worker = self._context, self._context.setup.worker
        wants = context.wants
        began = time.perf_counter()
        leaves, is_saving = wants.leaves and not ends, context.checkpoints.saving_step is not None
        worker.owes_save = checkpoint_is_due or wants.saves or wants.owes_save
        if is_best and not leaves and not ends:
            self.save_best(done)
        elif ends or (leaves and wants.saves) or (worker.owes_save and not leaves and not is_saving):
            self.save(done)
        if leaves and (wants.saves or wants.abandons or not is_saving):
            self._leave(done)
        worker.enter(BETWEEN_STEPS)
        context.blocked_s += time.perf_counter() - began

    def save(self, done: int) -> None:
        """Begin to write a checkpoint of the state after `done` steps."""
        self.finish_saving()
        context = self._context
        self._enter_save()
        context.checkpoints.save(done, context.setup.plan_digest, context.live.held())
        context.setup.worker.owes_save = False

    def save_best(self, done: int) -> None:
        """Write the checkpoint of the best state, and wait until it is committed. All ranks do the same.

        It is tried again if the storage fails, because later states do not have these weights. A failure that lasts, such as a full
        disk, does not stop the training.
        """
        self.save(done)
        for pause_s in BEST_PAUSES_S:
            if self.finish_saving() is None:
                return
            self._enter_save()
            time.sleep(pause_s)  # gives the storage time to recover
            self.save(done)
        self.finish_saving()

    def finish_saving(self) -> BaseException | None:
        """Wait for the checkpoint that is being written, and report its failure.

        Returns:
            The error of the checkpoint, or None.

        Raises:
            SupersededError: A newer attempt of the run exists.
        """
        context = self._context
        saving_step = context.checkpoints.saving_step
        if saving_step is not None:
            self._enter_save()
        error = context.checkpoints.wait()
        if isinstance(error, SupersededError):
            raise error
        if error:
            context.report(WarningEvent("checkpoint_failed", _reason(error)))
        elif saving_step is not None and context.snapshots:
            context.snapshots.checkpoint_committed(saving_step)
        return error

    def _leave(self, done: int) -> None:
        """End the group. All ranks must call this at the same step boundary."""
        context = self._context
        if context.wants.abandons and not context.wants.saves and context.checkpoints.saving_step is not None:
            context.checkpoints.abandon()
            context.setup.worker.owes_save = True
            context.report(WarningEvent("checkpoint_failed", "a worker had to leave its node before it was complete"))
        # A rank that will not be in the next group may have the only copy of a piece.
        if context.wants.gives_all or (context.wants.gives and not context.live.is_whole):
            self._give(done)
        self.finish_saving()
        raise LeaveGroup

    def _give(self, done: int) -> None:
        """Give the state to the controller, or begin to write a checkpoint if it has no room."""
        context, layout = self._context, self._context.setup.layout
        replicas = context.setup.replicas
        has_part = layout.is_first or not context.live.is_whole
        self._enter_save()
        num_bytes = state_bytes(context.live.held(), layout.control)
        is_given = not has_part or (
            replicas is not None and replicas.give(self._held_state(done, self._enter_save), num_bytes)
        )
        answers: list[Any] = [None] * layout.world_size
        dist.all_gather_object(answers, is_given, group=layout.control)
        if not all(answers):
            context.report(WarningEvent("no_room_for_state", step=done))
            self.save(done)

    def _enter_save(self) -> None:
        """Record that this rank stores or sends its state, or waits for other ranks that do so."""
        context = self._context
        context.setup.worker.progress.enter(SAVE, context.live.held().bytes / STORAGE_BYTES_S)

    def _held_state(self, done: int, copied: Callable[[], None]) -> HeldState:
        """Return the state of this rank after `done` steps in host memory, where the process keeps it.

        Args:
            done: Number of steps that the state includes.
            copied: Function that is called whenever a part of the state was copied.
        """
        context = self._context
        state = context.live.held().on_host(copied)
        return HeldState(context.setup.plan_digest, context.committed_by, done, state, tuple(context.rows))

    def copies(self) -> dict[str, RankState]:
        """Return the copies of the committed state that this rank has stored, would send or would hand over, by their purpose."""
        context, setup = self._context, self._context.setup
        assert context.committed is not None
        held = self._held_state(context.committed, lambda: None)
        replica = parsed(*packed(held.plan_digest, held.age, held.state, held.rows)).load()
        found = {"a checkpoint or a hand-over": held.state, "a replica": replica}
        if context.snapshots:
            context.snapshots.wait()
            # A snapshot of a state whose validation or `after_step` was to come need not be like the state after these.
            stored = find_snapshots(folder_of(setup.job.run_url, setup.job.run_id), setup.plan_digest)
            found.update(
                ("a snapshot", each.load())
                for each in stored
                if each.age == held.age and is_settled(each.meta["values"])
            )
        return found

    def report_unfinished(self) -> None:
        """Report that the group ends with a state that cannot be handed over, if that is so."""
        context = self._context
        if context.committed and context.telemetry and not context.baseline.is_intact:
            context.report(WarningEvent("unfinished_work", str(context.committed - 1), step=context.committed))

    def hand_over(self) -> None:
        """Keep the state of the last step boundary for the next worker group of this process, if that state is intact."""
        context, worker = self._context, self._context.setup.worker
        # Otherwise this group has no intact state of a committed step, and the process keeps what it held before.
        self.report_unfinished()
        if context.committed and context.baseline.is_intact:
            worker.held = None
            context.baseline.put_back()
            context.engine.free_gradients()
            worker.held = self._held_state(context.committed, lambda: worker.progress.enter(HAND_OVER))
            # The thread of the snapshots may still be copying one, and sending a replica of it.
            worker.progress.enter(HAND_OVER, 2 * worker.held.state.bytes / MEMORY_BYTES_S if context.snapshots else 0.0)
        self.close(wait=not worker.is_sound)

    def end(self, done: int, reason: str) -> None:
        """End the run after `done` steps: wait for the last checkpoint and delete the snapshots.

        Args:
            done: Number of committed steps.
            reason: Reason for which the run stops before its last step; empty if it does not.
        """
        context = self._context
        if error := self.finish_saving():
            raise StorageError(f"the last checkpoint of the run could not be written: {_reason(error)}") from error
        if context.snapshots:
            context.snapshots.delete()
        context.report(EndEvent(reason, step=done))

    def close(self, wait: bool = True) -> None:
        """End what watches optimizers, and the threads that run beside the training loop.

        Args:
            wait: Whether to wait until all reports are stored.
        """
        context = self._context
        context.guard.close()
        if context.stream:
            # Closing may wait for Ray Data's first block, which must not delay the next worker group.
            _in_thread(context.stream.close)
        if context.snapshots:
            context.snapshots.close()
        if context.telemetry and wait:
            context.telemetry.close()
        elif context.telemetry:
            _in_thread(context.telemetry.close)
        context.stream = context.batches = context.snapshots = context.telemetry = None


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _in_thread(close: Callable[[], None]) -> None:
    threading.Thread(target=close, name="undula-close", daemon=True).start()
