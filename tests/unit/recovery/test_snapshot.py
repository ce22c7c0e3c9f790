"""Tests of snapshots in the memory of a node."""

import itertools
import json
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from undula.parallel.layout import join_layout
from undula.recovery import node_memory, snapshot, snapshot_writer
from undula.recovery import node_memory as slots
from undula.recovery.rank_snapshots import find_offers
from undula.recovery.snapshot import Snapshot, available_memory, find_snapshots, is_private, packed, parsed
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.state.pieces import Piece, RankState, TensorSpec, rank_state
from undula.state.records import StepRow


def row(step: int) -> StepRow:
    return StepRow(1, step, 0, step + 1, 1, 2, 0.5, 0.1, 0.0, 0.1, 0.0, 0.0, 7, 1.0)


def state(value: float) -> dict[str, object]:
    return {
        "model.w": torch.full((3, 5), value),
        "model.half": torch.full((7,), value, dtype=torch.bfloat16),
        "model.none": torch.empty(0, 4),
        "optimizer.step": torch.tensor(value),
        "optimizer.lr": 0.25,
    }


def take(writer: SnapshotWriter, step: int) -> None:
    writer.begin(step, rank_state(state(float(step))), {}, [row(step - 1)])
    writer.wait()


def newest(folder: Path, plan_digest: str = "plan") -> Snapshot | None:
    return max(find_snapshots(folder, plan_digest), key=lambda found: found.age, default=None)


def loaded(folder: Path) -> dict[str, Any]:
    """Return the state of the newest snapshot."""
    found = newest(folder)
    assert found is not None
    return found.load().whole()


def test_a_snapshot_is_copied_on_the_gpu_that_has_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies has no current GPU of its own, so that torch would take the first one."""
    used: list[object] = []

    class Stream:
        def __init__(self, device: torch.device):
            used.append(device)

        def wait_event(self, event: object) -> None:
            used.append(event)

    ready = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(snapshot_writer, "ready_event", lambda tensors: ready)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    take(SnapshotWriter(tmp_path / "run", "plan"), 1)
    assert used == [ready.device, ready]
    assert float(loaded(tmp_path / "run")["model.w"][0, 0]) == 1.0


def test_the_newest_snapshot_of_a_plan_is_restored_unchanged(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "plan")
    for step in (1, 2, 3):
        take(writer, step)
    found = newest(tmp_path)
    assert found is not None
    assert (found.age, found.rows, found.holding) == ((0, 3), (row(2),), None)
    state_of_it = found.load().whole()
    assert state_of_it.keys() == state(3).keys()
    for name, value in state(3.0).items():
        assert torch.equal(state_of_it[name], value) if isinstance(value, torch.Tensor) else state_of_it[name] == value
    assert newest(tmp_path, "other plan") is None
    assert newest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("more", [{}, {"model.more": torch.ones(1000)}], ids=["same layout", "new layout"])
def test_a_writer_that_is_killed_during_a_write_leaves_the_previous_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, torch.Tensor]
) -> None:
    writer = SnapshotWriter(tmp_path, "plan")
    take(writer, 1)
    take(writer, 2)
    monkeypatch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
    writer.begin(3, rank_state({**state(3.0), **more}), {}, [])
    with pytest.raises(KeyboardInterrupt):
        writer.wait()
    assert [found.age for found in find_snapshots(tmp_path, "plan")] == [(0, 2)]
    assert torch.equal(loaded(tmp_path)["model.w"], torch.full((3, 5), 2.0))


def test_the_writer_of_a_new_attempt_keeps_the_existing_snapshots(tmp_path: Path) -> None:
    for attempt, left in ((1, [5]), (2, [5, 6]), (3, [5, 6, 7])):
        take(SnapshotWriter(tmp_path, "plan", attempt), attempt + 4)
        assert sorted(json.loads(meta.read_bytes())["step"] for meta in tmp_path.rglob("meta.json")) == left


def test_a_state_that_does_not_fit_is_reported_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(node_memory, "FREE_SHARE", 0.0)
        writer = SnapshotWriter(tmp_path / "no share", "plan")
        take(writer, 1)
    assert writer.problem is not None
    assert not writer.is_due(1.0)
    assert writer.bytes == 0
    monkeypatch.setattr(slots.os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    writer = SnapshotWriter(tmp_path / "full", "plan")
    take(writer, 1)
    assert writer.problem is not None
    assert "No space left" in writer.problem
    assert newest(tmp_path) is None


def test_the_interval_keeps_the_cost_below_a_hundredth_and_is_reported_once_it_is_known(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "plan")
    for step in range(1, 9):
        assert writer.cost() is None
        assert writer.is_due(step_s=0.1) or step > 1
        take(writer, step)
    writer._cost_s = 0.0005
    assert writer.cost() == (1, pytest.approx(0.005))
    writer._cost_s = 0.0025
    assert writer.cost() == (3, pytest.approx(0.0083, rel=0.01))
    assert [writer.is_due(step_s=0.1) for _ in range(3)] == [False, False, True]


def test_the_first_snapshot_in_each_slot_does_not_count_for_the_interval(tmp_path: Path) -> None:
    """It takes the slot's memory from the system. If it counted, the second snapshot of a run with short steps would come after minutes."""
    writer, state = SnapshotWriter(tmp_path, "plan"), rank_state({"model.w": torch.ones(3)})
    intervals = []
    for step, waited_s in enumerate([10.0, 10.0, 0.0042, 0.0042]):
        writer.is_due(step_s=0.1)
        writer.begin(step, state, {}, [], waited_s=waited_s)
        writer.wait()
        intervals.append(writer.every_steps)
    assert intervals[:2] == [1, 1]
    assert max(intervals) < 1000


def test_a_finished_run_leaves_no_memory_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    writer = SnapshotWriter(folder, "plan")
    take(writer, 1)
    assert writer.bytes > 0
    writer.delete()
    assert not folder.exists()


def test_tensors_are_restored_with_their_strides(tmp_path: Path) -> None:
    dense = torch.arange(24.0).view(2, 3, 4, 1)
    tensors = [dense.permute(order) for order in itertools.permutations(range(4))]
    tensors += [dense[:, ::2], dense.transpose(0, 2)[::2], torch.ones(1).expand(3), torch.ones(3, 4, 1, 1)]
    states = rank_state({str(number): tensor for number, tensor in enumerate(tensors)})
    writer = SnapshotWriter(tmp_path, "plan")
    writer.begin(1, states, {}, [])
    writer.wait()
    found = newest(tmp_path)
    assert found is not None
    for name, piece in found.load().pieces.items():
        assert torch.equal(piece.tensor, tensors[int(name)])
        assert piece.tensor.stride() == tensors[int(name)].clone().stride()
    assert found.load().expected == states.expected


def test_a_shard_is_restored_as_a_shard(tmp_path: Path) -> None:
    piece = Piece(torch.arange(6.0).view(2, 3), (5, 3), (3, 0))
    meta, data = packed("plan", (2, 7), RankState({"w": piece}, {"lr": 0.5}), [row(6)])
    found = parsed(meta, data)
    assert (found.age, found.rows) == ((2, 7), (row(6),))
    assert found.holding is not None
    assert found.holding.expected == {"w": TensorSpec("float32", (5, 3))}
    assert found.holding.boxes == {"w": ((3, 0), (2, 3))}
    again = found.load().pieces["w"]
    assert (again.shape, again.offsets) == (piece.shape, piece.offsets)
    assert torch.equal(again.tensor, piece.tensor)


def test_a_changed_set_of_tensors_gets_a_new_layout(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "plan")
    take(writer, 1)
    grown = {**state(2.0), "model.more": torch.ones(1000)}
    writer.begin(2, rank_state(grown), {"model.more": torch.full((1000,), 3.0)}, [])
    writer.wait()
    assert writer.problem is None
    assert torch.equal(loaded(tmp_path)["model.w"], torch.full((3, 5), 2.0))
    assert torch.equal(loaded(tmp_path)["model.more"], torch.full((1000,), 3.0))


def test_a_snapshot_that_is_being_sent_does_not_change_when_the_layout_does(tmp_path: Path) -> None:
    writer, laid_out, sent = SnapshotWriter(tmp_path, "plan"), threading.Event(), []

    def send(meta: bytes, data: memoryview) -> None:
        assert laid_out.wait(10)
        sent.append(parsed(meta, bytearray(data)))

    for step, size in ((1, 100), (2, 1000), (3, 10)):
        held = rank_state({"model.w": torch.full((size,), float(step))})
        laid_out.clear()
        writer.begin(step, held, {}, [], send)
        writer.wait()
        writer.begin(step, rank_state({"model.w": torch.zeros(size + 50)}), {}, [])
        laid_out.set()
        writer.wait()
    writer.close()
    assert [found.load().pieces["model.w"].tensor.unique().tolist() for found in sent] == [[1.0], [2.0], [3.0]]


def test_the_memory_of_old_runs_is_freed_and_that_of_this_run_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "undula-0"
    take(SnapshotWriter(folder / "own", "plan", rank=3), 1)
    for run in ("old", "recent"):
        for rank in range(2):
            take(SnapshotWriter(folder / run, "plan", rank=rank), 1)
    for slot in [*folder.glob("own/*/3/*"), *folder.glob("old/*/*/*"), *folder.glob("recent/*/1/*")]:
        os.utime(slot, (0, 0))
    writer = SnapshotWriter(folder / "own", "plan")
    take(writer, 2)
    assert writer.problem is None
    assert sorted(path.name for path in folder.iterdir()) == ["own", "recent"]
    assert {found.age for found in find_snapshots(folder / "own", "plan")} == {(0, 1), (0, 2)}


@pytest.mark.usefixtures("process_group")
def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    layout = join_layout(0, 1, torch.device("cpu"))
    folder = tmp_path / "open" / "run"
    take(SnapshotWriter(folder, "plan"), 1)
    assert is_private(folder)
    folder.parent.chmod(0o777)
    writer = SnapshotWriter(folder, "plan")
    take(writer, 2)
    assert writer.problem == f"other users can write to {folder.parent}; remove that folder"
    assert find_offers(folder, "plan", None, layout, lambda *age: True) == []
    folder.parent.chmod(0o700)
    assert [found.base.age for found in find_offers(folder, "plan", None, layout, lambda *age: True)] == [(0, 1)]


def test_the_memory_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("max", "5000"), ("current", "4000"), ("stat", "anon 3000\ninactive_file 500\nslab 1\n")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(snapshot, "CONTROL_GROUPS", ((tmp_path, "memory.max", "memory.current", "inactive_file"),))
    assert available_memory() == 1500
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 2**20


def test_a_snapshot_of_another_version_is_ignored(tmp_path: Path) -> None:
    take(SnapshotWriter(tmp_path, "plan"), 1)
    (meta,) = tmp_path.rglob("meta.json")
    meta.write_text(json.dumps({"plan_digest": "plan", "step": 1}))
    assert newest(tmp_path) is None
