"""Tests of which rank stores and sends what of a state in which virtual workers have tensors of their own."""

from pathlib import Path
from typing import Any

import torch
from ranks import on_ranks
from torch import nn

from undula.parallel.layout import join_layout
from undula.recovery.live_state import LiveState
from undula.recovery.rank_snapshots import RankSnapshots
from undula.recovery.replica_store import Replica, ReplicaStore
from undula.recovery.snapshot import find_snapshots
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.recovery.worker_state import WorkerState
from undula.state.pieces import Rows, is_complete

VIRTUAL_WORKERS = 8
ROW_BYTES = 64 * 4
RANKS, PER_NODE = 4, 2


class Replicas:
    """Client that keeps what its rank sends."""

    def __init__(self) -> None:
        self.sent: tuple[bytes, bytearray] | None = None

    def sender(self, state_bytes: int) -> Any:
        self.state_bytes = state_bytes
        return self._keep

    def _keep(self, meta: bytes, data: memoryview) -> None:
        self.sent = meta, bytearray(data)


def take_snapshot(rank: int, world_size: int, folder: str) -> tuple[Any, ...]:
    """Take a snapshot and send it.

    Returns:
        Bytes of the rank's state without rows, those of all that is sent, and the replica of this rank.
    """
    layout = join_layout(rank, world_size, torch.device("cpu"), local_rank=rank % PER_NODE)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    rows = {number: torch.full((64,), float(number)) for number in layout.virtual_workers(VIRTUAL_WORKERS)}
    live = LiveState(model, optimizer, lambda: {"part.rows": Rows(rows, VIRTUAL_WORKERS)})
    writer, replicas = SnapshotWriter(Path(folder) / f"node-{rank // PER_NODE}", "plan", 0, rank), Replicas()
    snapshots: Any = RankSnapshots(live, writer, replicas, layout, WorkerState())  # type: ignore[arg-type]
    snapshots.begin(3, [], is_sent=True)
    snapshots.close()
    return live.held().bytes - len(rows) * ROW_BYTES, replicas.state_bytes, replicas.sent


def test_the_model_is_written_once_on_each_node_and_sent_once(tmp_path: Path) -> None:
    ranks = on_ranks(RANKS, take_snapshot, str(tmp_path))
    common, rows = ranks[0][0], VIRTUAL_WORKERS // RANKS * ROW_BYTES
    assert {state_bytes for _, state_bytes, _ in ranks} == {common + RANKS * rows}
    kept = [find_snapshots(tmp_path / f"node-{node}", "plan") for node in range(RANKS // PER_NODE)]
    for of_node in kept:
        sizes = sorted(snapshot.bytes for snapshot in of_node)
        assert len(sizes) == PER_NODE
        assert sizes[0] == rows
        assert common + rows <= sizes[1] < common + rows + 64 * 20, "each tensor begins at a multiple of 64 bytes"
    sizes = [len(data) for _, _, (_, data) in ranks]
    assert sizes[1:] == [rows] * (RANKS - 1)
    assert sizes[0] == max(snapshot.bytes for snapshot in kept[0])


def test_what_all_ranks_have_sent_is_the_whole_state_and_one_part_alone_is_not(tmp_path: Path) -> None:
    replicas = [Replica.of(*sent) for _, _, sent in on_ranks(RANKS, take_snapshot, str(tmp_path))]
    store = ReplicaStore()
    for number, replica in enumerate(replicas):
        assert store.newest_whole != (0, 3)
        store.keep(str(number), replica, RANKS)
    assert store.newest_whole == (0, 3)
    snapshots = [each for node in (0, 1) for each in find_snapshots(tmp_path / f"node-{node}", "plan")]
    assert is_complete(each.holding for each in snapshots)
    assert not is_complete(each.holding for each in snapshots[1:])
    states = [each.load() for each in snapshots]
    values = {
        name: piece.tensor[0].item() for state in states for name, piece in state.pieces.items() if "rows" in name
    }
    assert values == {f"part.rows.{number}": float(number) for number in range(VIRTUAL_WORKERS)}
