"""Snapshots of a rank's live state: which ranks take them and when, and how a new group finds those of former groups."""

from collections.abc import Sequence
from pathlib import Path

from undula.parallel.layout import Layout
from undula.recovery.live_state import LiveState
from undula.recovery.replica import ReplicaClient
from undula.recovery.snapshot import Snapshot, find_snapshots, is_private
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.recovery.worker_state import WorkerState
from undula.state.events import SnapshotEvent, WarningEvent
from undula.state.records import StepRow


class RankSnapshots:
    """Takes the snapshots of one rank. Rank 0 decides when, so that the snapshots of all ranks are of the same steps.

    If every rank holds the whole state, only one rank per node writes snapshots, and only rank 0 sends replicas.

    Args:
        live: State of the run on this rank.
        writer: Snapshot writer of this rank.
        replicas: Client of the controller's replica store; None if the controller is Ray's own.
        layout: Layout of the group.
        worker: State that this process keeps between groups.
    """

    def __init__(
        self,
        live: LiveState,
        writer: SnapshotWriter,
        replicas: ReplicaClient | None,
        layout: Layout,
        worker: WorkerState,
    ):
        self._live = live
        self._layout = layout
        self._worker = worker
        self._replicas = replicas
        self._writer: SnapshotWriter | None = writer

    @property
    def _writes(self) -> bool:
        return self._layout.local_rank == 0 or not self._live.is_whole

    @property
    def _sends(self) -> bool:
        return self._replicas is not None and (self._layout.is_first or not self._live.is_whole)

    def wants(self, step_s: float) -> tuple[bool, bool]:
        """Return whether to take a snapshot after this step, and whether to send a replica of it.

        Rank 0 decides for all ranks; on the other ranks, both are False.

        Args:
            step_s: Duration of the previous step in seconds.
        """
        if not self._layout.is_first or self._writer is None:
            return False, False
        takes = self._writer.is_due(step_s)
        return takes, takes and self._replicas is not None and self._replicas.is_due(self._live.is_whole)

    def begin(self, done: int, rows: Sequence[StepRow], is_sent: bool) -> None:
        """Start taking a snapshot of the state, if this rank writes snapshots.

        Args:
            done: Number of steps that the state includes.
            rows: Rows of the ledger that may not have reached storage.
            is_sent: Whether to send a replica, if this rank sends replicas.
        """
        if self._writer and self._writes and not self._writer.problem:
            send = self._replicas.send if self._replicas and self._sends and is_sent else None
            self._writer.begin(done, self._live.held(), self._live.buffers(), rows, send)

    def wait(self) -> None:
        """Wait until the snapshot in progress is complete. Call this before the tensors change."""
        if self._writer:
            self._writer.wait()

    @property
    def lacks_piece(self) -> bool:
        """Whether this rank cannot store its pieces, so that the snapshots of the other ranks are incomplete and useless."""
        return self._writer is not None and self._writer.problem is not None and not self._live.is_whole

    def news(self, done: int, lacks_piece: bool) -> SnapshotEvent | WarningEvent | None:
        """Return the event about snapshots that is due, if any: their cost, which is reported once, or the reason why they have stopped.

        Args:
            done: Number of committed steps.
            lacks_piece: Whether any rank cannot store its pieces. All ranks have agreed on the answer.
        """
        if self._writer is None:
            return None
        if lacks_piece or (self._writer.problem and self._live.is_whole):
            problem = self._writer.problem or "the node of another rank has no room for that rank's pieces"
            self.close()
            return WarningEvent("no_snapshots", problem, step=done)
        if self._worker.has_reported_snapshots or not (cost := self._writer.cost()):
            return None
        self._worker.has_reported_snapshots = True
        return SnapshotEvent(self._writer.bytes, *cost, step=done)

    def delete(self) -> None:
        """Free the memory of the snapshots. Call this when the run is over."""
        if self._writer:
            self._writer.delete()
        self._writer = None

    def close(self) -> None:
        """Stop taking snapshots, and leave the existing ones for a later group."""
        if self._writer:
            self._writer.close()
        self._writer = None


def find_state(folder: Path, plan_digest: str, replicas: ReplicaClient | None, layout: Layout) -> list[Snapshot]:
    """Find the snapshots of a plan that a rank can read: those in the memory of its node, and its share of the controller's replicas.

    The replicas are needed because all nodes that held a part of the state may be gone.
    """
    found = find_snapshots(folder, plan_digest) if is_private(folder) else []
    if replicas:
        fetched = replicas.fetch(layout.rank, layout.world_size)
        found += [each for each in fetched if each.plan_digest == plan_digest]
    return found
