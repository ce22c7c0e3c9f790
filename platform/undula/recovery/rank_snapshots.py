"""Snapshots of a rank's live state: which ranks take them and when, and how a new group finds those of former groups."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from undula.parallel.layout import Layout
from undula.recovery.live_state import LiveState
from undula.recovery.offers import Offer
from undula.recovery.snapshot import SLOTS, UPDATE_SLOTS, find_snapshots, is_private, state_bytes
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.recovery.update_log import ScriptPlace, UpdateLog
from undula.recovery.worker_state import WorkerState
from undula.state.events import SnapshotEvent, WarningEvent
from undula.state.pieces import RankState
from undula.state.records import StepRow

if TYPE_CHECKING:
    from undula.recovery.replica import ReplicaClient  # which imports Ray


class RankSnapshots:
    """Takes the snapshots of one rank. Rank 0 decides when, so that the snapshots of all ranks are of the same steps.

    What all ranks hold, such as a model that is not sharded, is written by one rank of each node, and sent by rank 0 alone. If that is
    the whole state, other ranks write and send nothing.

    At each step, all ranks call `wait` before they agree on the step and `agreed` afterwards. So they know then that all of them have
    stored the last snapshot, and that those of former attempts are no longer needed.

    Args:
        live: State of the run on this rank.
        writer: Snapshot writer of this rank.
        replicas: Client of the controller's replica store; None if the controller is Ray's own.
        layout: Layout of the group.
        worker: State that this process keeps between groups.
        updates: Record of the updates between two snapshots; None if the state is whole on each rank.
    """

    def __init__(
        self,
        live: LiveState,
        writer: SnapshotWriter,
        replicas: "ReplicaClient | None",
        layout: Layout,
        worker: WorkerState,
        updates: UpdateLog | None = None,
    ):
        self._live = live
        self._layout = layout
        self._worker = worker
        self._replicas = replicas
        self._writer = writer
        self._updates = updates
        self._has_ended = False
        self._has_begun = False
        self._has_replaced_former = False
        self._last_step = 0
        """Number of steps that the last snapshot includes."""

    @property
    def _writes(self) -> bool:
        return self._layout.local_rank == 0 or not self._live.is_whole

    @property
    def _sends(self) -> bool:
        return self._replicas is not None and (self._layout.is_first or not self._live.is_whole)

    def wants(self, step_s: float, always: bool = False) -> tuple[bool, bool]:
        """Return whether to take a snapshot after this step, and whether to send a replica of it.

        Rank 0 decides for all ranks; on the other ranks, both are False.

        Args:
            step_s: Duration of the previous step in seconds.
            always: Whether a snapshot is needed after each step, unless the job says how often to take one.
        """
        if not self._layout.is_first or self._has_ended:
            return False, False
        takes = self._writer.is_due(step_s, always)
        return takes, takes and self._replicas is not None and self._replicas.is_due(self._live.is_whole)

    def begin(self, done: int, rows: Sequence[StepRow], is_sent: bool, attempt: int | None = None) -> None:
        """Start taking a snapshot of the state, if this rank writes snapshots. All ranks must call this at the same step.

        Args:
            done: Number of steps that the state includes.
            rows: Rows of the ledger that may not have reached storage.
            is_sent: Whether to send a replica, if this rank sends replicas.
            attempt: Number of the attempt that has committed the last of the steps; by default this one.
        """
        if self._has_ended:
            return
        if not (self._writes or is_sent):
            return
        began = time.perf_counter()
        held = self._live.held()
        waited_s = time.perf_counter() - began
        stored, sent = self.stored(held), self._part(held, self._layout.is_first) if is_sent else held
        num_bytes = state_bytes(sent, self._layout.control) if is_sent else 0
        if self._writes:
            send = self._replicas.sender(num_bytes) if self._replicas and self._sends and num_bytes else None
            self._writer.begin(done, stored, self._live.copies(stored), rows, send, waited_s, attempt, sent)
            self._last_step = done
            self._has_begun = True

    def stored(self, held: RankState) -> RankState:
        """Return the part of a state that this rank writes to the memory of its node."""
        return self._part(held, self._layout.local_rank == 0 or self._layout.is_first)

    def _part(self, held: RankState, is_first: bool) -> RankState:
        """Return the part of a state that the first or another one of several ranks gives: its own pieces, and then the common ones."""
        if held.is_whole or self._updates:  # updates are taken again from what one rank has stored
            return held
        return replace(held, pieces={**held.own.pieces, **held.pieces}) if is_first else held.own

    def wait(self) -> None:
        """Wait until the snapshot in progress is complete. Call this before the tensors change."""
        if not self._has_ended:
            self._writer.wait()

    @property
    def lacks_piece(self) -> bool:
        """Whether this rank cannot store its part, so that all ranks must stop taking snapshots.

        If every rank holds the whole state, only rank 0 is indispensable, because it decides when snapshots are taken.
        """
        return self._has_problem and (self._layout.is_first or not self._live.is_whole)

    @property
    def is_sending(self) -> bool:
        """Whether the replica of this rank's last snapshot is still on its way."""
        return self._replicas is not None and self._replicas.is_on_its_way

    @property
    def _has_problem(self) -> bool:
        return not self._has_ended and self._writer.problem is not None

    def agreed(self, done: int, lacks_piece: bool, is_sending: bool) -> SnapshotEvent | WarningEvent | None:
        """Act on what the ranks have agreed on at a step.

        If snapshots cannot continue, the last one is deleted on all ranks. The one before, or those of a former attempt, remain until
        `checkpoint_committed`, because they may be the newest complete state outside of the workers.

        Args:
            done: Number of committed steps.
            lacks_piece: Whether any rank cannot store its part.
            is_sending: Whether any rank's replica is still on its way.

        Returns:
            Event about snapshots that is due, if any: their cost, which is reported once, or the reason why they have stopped.
        """
        if self._has_ended:
            return None
        if lacks_piece or self._has_problem:
            problem = self._writer.problem or "the node of another rank has no room for that rank's pieces"
            self.discard()
            return WarningEvent("no_snapshots", problem, step=done)
        if self._has_begun and not self._has_replaced_former:
            self._has_replaced_former = True
            self._writer.delete_former_attempts()
        if is_sending and self._replicas:
            self._replicas.still_on_its_way()
        if self._worker.has_reported_snapshots or not (cost := self._writer.cost()):
            return None
        self._worker.has_reported_snapshots = True
        return SnapshotEvent(self._writer.bytes, *cost, step=done)

    def checkpoint_committed(self, step: int) -> None:
        """Free the memory of snapshots that will not be replaced, if the checkpoint of `step` is at least as new as they are."""
        if self._has_ended and step >= self._last_step:
            self._writer.delete_own()

    def discard(self) -> None:
        """Stop taking snapshots, and delete the last one, because it may be of no step. The one before stays."""
        self._has_ended = True
        if self._updates:
            self._updates.close()
        self._writer.discard()

    def delete(self) -> None:
        """Free the memory of the snapshots. Call this when the run is over."""
        self._has_ended = True
        self._writer.delete()

    def close(self) -> None:
        """Stop taking snapshots, and leave the existing ones for a later group."""
        self._has_ended = True
        self._writer.close()


def find_offers(
    folder: Path, plan_digest: str, replicas: "ReplicaClient | None", layout: Layout, is_of_run: Callable[..., bool]
) -> list[Offer]:
    """Find the states of a plan that a rank can read: those in the memory of its node, and its share of the controller's replicas.

    The replicas are needed because all nodes that held a part of the state may be gone.

    Args:
        folder: Folder of the run in the memory of this node.
        plan_digest: Digest of the run's plan.
        replicas: Client of the controller's replica store; None if the controller is Ray's own.
        layout: Layout of the group.
        is_of_run: Function that returns whether the attempt and the step of a state belong to the run.
    """
    is_readable = is_private(folder)
    bases, updates = (
        [stored for stored in find_snapshots(folder, plan_digest, names) if is_of_run(*stored.age)]
        if is_readable
        else []
        for names in (SLOTS, UPDATE_SLOTS)
    )
    offers = [
        Offer.of(base, (each for each in updates if each.folder == base.folder), ScriptPlace.noted_in(base.folder))
        for base in bases
    ]
    fetched = replicas.fetch(layout.rank, layout.world_size) if replicas else []
    return offers + [Offer(each) for each in fetched if each.plan_digest == plan_digest and is_of_run(*each.age)]
