"""Snapshots of a rank's live state: when they are taken, by which ranks, and where a new group finds them."""

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
    """Takes snapshots when rank 0 says so, so that all ranks have the same steps.

    Where every rank has all of the state, one rank of each node writes it, and rank 0 sends replicas.

    Args:
        live: the state.
        writer: of this rank.
        replicas: client of the controller's replica store; None under a controller of Ray's own.
        layout: the ranks of the group.
        worker: the state of this process.
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
        """Whether to take a snapshot after a step, and to send it. Rank 0 decides for all ranks.

        Args:
            step_s: seconds that the step before took.
        """
        if not self._layout.is_first or self._writer is None:
            return False, False
        takes = self._writer.is_due(step_s)
        return takes, takes and self._replicas is not None and self._replicas.is_due(self._live.is_whole)

    def begin(self, done: int, rows: Sequence[StepRow], is_sent: bool) -> None:
        """Begin to take a snapshot of `done` steps."""
        if self._writer and self._writes and not self._writer.problem:
            send = self._replicas.send if self._replicas and self._sends and is_sent else None
            self._writer.begin(done, self._live.held(), self._live.buffers(), rows, send)

    def wait(self) -> None:
        """Wait for the snapshot under way; called before the tensors change."""
        if self._writer:
            self._writer.wait()

    @property
    def lacks_piece(self) -> bool:
        """Whether there is no memory for this rank's pieces, without which those of the others are of no use."""
        return self._writer is not None and self._writer.problem is not None and not self._live.is_whole

    def news(self, done: int, lacks_piece: bool) -> SnapshotEvent | WarningEvent | None:
        """The event about the snapshots that is due: their cost, once, or why there are none any more.

        Args:
            done: number of committed steps.
            lacks_piece: whether the pieces of any rank are missing, as all ranks agreed.
        """
        if self._writer is None:
            return None
        if lacks_piece or (self._writer.problem and self._live.is_whole):
            problem = self._writer.problem or "the node of another rank has no room for its pieces"
            self.close()
            return WarningEvent("no_snapshots", problem, step=done)
        if self._worker.has_reported_snapshots or not (cost := self._writer.cost()):
            return None
        self._worker.has_reported_snapshots = True
        return SnapshotEvent(self._writer.bytes, *cost, step=done)

    def delete(self) -> None:
        """Free the memory of the snapshots: the run is over."""
        if self._writer:
            self._writer.delete()
        self._writer = None

    def close(self) -> None:
        """Leave the snapshots for a later group."""
        if self._writer:
            self._writer.close()
        self._writer = None


def find_state(folder: Path, plan_digest: str, replicas: ReplicaClient | None, layout: Layout) -> list[Snapshot]:
    """The snapshots that a rank can read: those of its node, and its share of the controller's, as all other nodes may be gone."""
    found = find_snapshots(folder, plan_digest) if is_private(folder) else []
    if replicas:
        fetched = replicas.fetch(layout.rank, layout.world_size)
        found += [each for each in fetched if each.plan_digest == plan_digest]
    return found
