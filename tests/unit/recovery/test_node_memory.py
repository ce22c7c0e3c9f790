"""Tests that the ranks and the runs of a node keep the limit of its memory for snapshots together, and free what they no longer need."""

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from undula.parallel.layout import Layout, join_layout
from undula.recovery import node_memory
from undula.recovery import node_memory as slots
from undula.recovery.rank_snapshots import RankSnapshots
from undula.recovery.snapshot import find_snapshots, slots_below
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.recovery.worker_state import WorkerState
from undula.state.events import WarningEvent
from undula.state.pieces import Piece, RankState, is_complete

PAGE = 4096
pytestmark = pytest.mark.usefixtures("process_group")


def taken(folder: Path) -> int:
    """Return the bytes of the memory that files take."""
    total = 0
    for slot in slots_below(folder):
        for name in ("data", "data.new"):
            with suppress(FileNotFoundError):  # a thread deletes it at the same time
                total += (slot / name).stat().st_blocks * 512
    return total


@dataclass
class Node:
    """Node whose only use of memory is snapshots."""

    folder: Path
    memory: int
    most: int = 0
    """Largest use of memory so far, in bytes."""

    def free(self) -> int:
        return self.memory - taken(self.folder)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(tmp_path / "undula-0", 100 * PAGE)
    monkeypatch.setattr(node_memory, "free_memory", node.free)
    write = SnapshotWriter.wait

    def observed(writer: SnapshotWriter) -> None:
        write(writer)
        node.most = max(node.most, taken(node.folder))

    monkeypatch.setattr(SnapshotWriter, "wait", observed)
    return node


class Group:
    """Ranks of a sharded model that all run on one node, or ranks with the whole model on Ray nodes of one machine, in this process."""

    def __init__(self, node: Node, attempt: int, ranks: int, pages: int, run: str = "run", is_whole: bool = False):
        layout = join_layout(0, 1, torch.device("cpu"))
        self.is_whole = is_whole
        self.folder = node.folder / run
        self.worker = WorkerState()
        self.ranks = [self._rank(layout, attempt, rank, ranks, pages) for rank in range(ranks)]
        self.warnings: list[str] = []

    def _rank(self, layout: Layout, attempt: int, rank: int, ranks: int, pages: int) -> RankSnapshots:
        size = pages * PAGE if self.is_whole else pages * PAGE // ranks
        whole = (size if self.is_whole else max(ranks, 2) * size,)  # with one rank, another node has the other half
        start = 0 if self.is_whole else rank * size
        piece = Piece(torch.full((size,), attempt, dtype=torch.uint8), whole, (start,), is_replicated=self.is_whole)
        state = RankState({"w": piece}, {})
        live: Any = SimpleNamespace(held=lambda: state, copies=lambda held: {}, is_whole=self.is_whole)
        writer = SnapshotWriter(self.folder, "plan", attempt, rank, 1)
        local_rank = 0 if self.is_whole else rank
        return RankSnapshots(live, writer, None, replace(layout, rank=rank, local_rank=local_rank), self.worker)

    def step(self, *steps: int) -> "Group":
        """Commit steps, and take a snapshot of each."""
        for done in steps:
            self.wait()
            lacks = any(rank.lacks_piece for rank in self.ranks)
            for rank in self.ranks:
                event = rank.agreed(done, lacks, is_sending=False)
                self.warnings += [event.detail] if isinstance(event, WarningEvent) else []
            for rank in self.ranks:
                rank.begin(done, [], is_sent=False)
        return self

    def wait(self) -> None:
        for rank in self.ranks:
            rank.wait()

    def save(self, step: int) -> None:
        for rank in self.ranks:
            rank.checkpoint_committed(step)

    def end(self) -> None:
        for rank in self.ranks:
            rank.close()


def states(folder: Path) -> list[tuple[int, int]]:
    """Return the ages of the complete states in a folder."""
    found = find_snapshots(folder, "plan")
    ages = {each.age for each in found}
    return sorted(age for age in ages if is_complete([each.holding for each in found if each.age == age]))


def test_the_ranks_of_a_node_exceed_the_limit_neither_together_nor_for_a_moment(node: Node) -> None:
    group = Group(node, 1, ranks=4, pages=48)  # the slots of a rank take 24 of 100 pages
    group.step(1, 2, 3)
    assert len(group.warnings) == 4
    assert node.most <= node.memory / 2
    assert taken(node.folder) == 0
    assert not list(group.folder.iterdir())


def test_a_process_that_keeps_the_lock_of_the_memory_holds_nobody_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_memory, "LOCK_S", 0.1)
    node.folder.mkdir(mode=0o700)
    descriptor = os.open(node.folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    group = Group(node, 1, ranks=1, pages=4)
    group.step(1, 2)
    group.end()
    os.close(descriptor)
    assert "has held the lock" in str(group.warnings[0])
    assert states(group.folder) == []


def test_a_state_that_fits_is_kept_twice(node: Node) -> None:
    group = Group(node, 1, ranks=4, pages=24)
    group.step(1, 2, 3)
    group.end()
    assert group.warnings == []
    assert states(group.folder) == [(1, 2), (1, 3)]
    assert taken(node.folder) == 48 * PAGE


def test_runs_on_one_node_count_the_memory_that_others_have_reserved(node: Node) -> None:
    first, second = (Group(node, 1, ranks=2, pages=20, run=run) for run in ("one", "two"))
    first.step(1)
    first.wait()
    second.step(1)  # 60 of 100 pages are left, although the first run has filled only one slot
    first.step(2)
    second.step(2)
    assert first.warnings == []
    assert len(second.warnings) == 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_snapshots_of_the_former_attempt_stay_until_all_ranks_have_stored_a_new_one(node: Node, ranks: int) -> None:
    former = Group(node, 1, ranks=3, pages=24)
    former.step(1, 2).end()
    group = Group(node, 2, ranks, pages=8 * ranks)
    group.step(3)
    group.ranks[0].wait()
    assert (1, 2) in states(group.folder)
    group.step(4, 5)
    group.end()
    assert [int(each.name) for each in group.folder.iterdir()] == [2]  # also without the slots of ranks that are gone
    assert taken(node.folder) == 2 * 8 * ranks * PAGE


def test_a_state_that_does_not_fit_beside_that_of_the_former_attempt_leaves_it_until_a_checkpoint(node: Node) -> None:
    former = Group(node, 1, ranks=2, pages=24)
    former.step(1, 2).end()
    group = Group(node, 2, ranks=2, pages=32)
    group.step(3, 4)
    assert len(group.warnings) == 2
    assert states(group.folder) == [(1, 1), (1, 2)]
    group.save(4)
    assert taken(node.folder) == 0


def test_a_node_that_runs_out_of_memory_leaves_the_last_complete_state_until_a_checkpoint(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(node, 1, ranks=2, pages=8)
    group.step(1)
    group.wait()

    monkeypatch.setattr(slots.os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    group.step(2, 3)
    assert group.warnings == ["[Errno 28] No space left on device"] * 2
    assert states(group.folder) == [(1, 1)]
    assert taken(node.folder) == 8 * PAGE
    group.save(0)  # of an earlier step than the snapshot that is kept
    assert taken(node.folder) == 8 * PAGE
    group.save(2)
    assert taken(node.folder) == 0


def test_a_state_that_grows_beyond_the_memory_leaves_the_last_complete_one(node: Node) -> None:
    group = Group(node, 1, ranks=2, pages=8)
    group.step(1, 2, 3)
    larger = Group(node, 1, ranks=2, pages=60)
    for rank, other in zip(group.ranks, larger.ranks, strict=True):
        rank._live = other._live
    group.step(4, 5)
    assert len(group.warnings) == 2
    assert states(group.folder) == [(1, 3)]
    assert taken(node.folder) == 8 * PAGE


def test_a_process_of_a_former_attempt_cannot_change_the_snapshots_of_the_new_one(node: Node) -> None:
    late, group = Group(node, 1, ranks=2, pages=8), Group(node, 2, ranks=2, pages=8)
    late.step(1)
    group.step(2, 3)
    group.end()
    late.step(4, 5)
    assert states(group.folder) == [(2, 2), (2, 3)]
    assert len(late.warnings) == 2


def test_a_ray_node_without_room_leaves_the_snapshots_of_another_one_on_its_machine(node: Node) -> None:
    group = Group(node, 1, ranks=2, pages=20, is_whole=True)  # the slots of one rank fit
    group.step(1, 2, 3)
    assert len(group.warnings) == 1
    group.save(3)
    group.step(4, 5)
    group.end()
    assert states(group.folder) == [(1, 4), (1, 5)]
    assert taken(node.folder) == 40 * PAGE
