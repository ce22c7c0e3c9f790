"""A group begins at the newest state there is: of the last attempt, and there of the last step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from undula.recovery.handover import Kept
from undula.recovery.restore import Restored, restore
from undula.recovery.snapshot import Snapshot, find_snapshots
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.state.checkpoint import Checkpointer
from undula.state.model_state import model_and_optimizer_state
from undula.state.pieces import rank_state
from undula.storage import Store

pytestmark = pytest.mark.usefixtures("process_group")
Age = tuple[int, int]


def trained(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def state(value: float) -> dict[str, Any]:
    """Of a model, its optimizer and a tensor beside them."""
    return {**model_and_optimizer_state(*trained(value)), "measured": torch.full((2,), value, dtype=torch.float64)}


def restored(
    folder: Path, kept: Age | None, snapshot: Age | None, saved: Age | None, attempt: int
) -> tuple[Restored, float, list[int]]:
    """What a group of this attempt begins with; the weight is 1 of the kept state, 2 of the snapshot, 3 of the checkpoint, else 0."""
    world = dist.group.WORLD
    assert world is not None
    mine = Kept("plan", *kept, rank_state(state(1)), ()) if kept else None
    if snapshot:
        writer = SnapshotWriter(folder / "memory", "plan", snapshot[0])
        writer.begin(snapshot[1], rank_state(state(2)), {}, [])
        writer.close()
    if saved:
        former = Checkpointer(Store(str(folder)), world, saved[0], keep=2)
        former.save(saved[1], "plan", state(3))
        assert former.wait() is None
    checkpoints = Checkpointer(Store(str(folder)), world, attempt, keep=2)
    model, optimizer = trained(0)
    begun: list[int] = []
    beside = {"measured": torch.zeros(2, dtype=torch.float64)}

    def find() -> list[Snapshot]:
        return find_snapshots(folder / "memory", "plan")

    result = restore(model, optimizer, checkpoints, "plan", mine, find, begun.append, attempt, world, beside)
    assert beside["measured"].tolist() == [model.weight[0, 0].item()] * 2  # type: ignore[union-attr, index, operator]
    return result, model.weight[0, 0].item(), begun  # type: ignore[union-attr, index, operator]


@pytest.mark.parametrize(
    ("kept", "snapshot", "saved", "weight", "step"),
    [
        (None, None, None, 0, 0),
        ((4, 50), (4, 50), (4, 40), 1, 50),
        (None, (4, 50), (4, 40), 2, 50),
        (None, (4, 40), (4, 50), 3, 50),
        # An attempt that others went on without had come further: its steps are no longer the run's.
        ((2, 90), (4, 50), (4, 40), 2, 50),
        ((2, 90), None, (4, 40), 3, 40),
        (None, (2, 90), (4, 40), 3, 40),
        # What stands since then is still the newest where nothing came of the later attempts.
        ((2, 90), (2, 80), (1, 40), 1, 90),
    ],
)
def test_the_newest_state_of_the_last_attempt_is_taken(
    tmp_path: Path, kept: Age | None, snapshot: Age | None, saved: Age | None, weight: float, step: int
) -> None:
    result, found, begun = restored(tmp_path, kept, snapshot, saved, attempt=5)
    assert (found, result.step, begun) == (weight, step, [step])
    assert result.is_checkpoint == (weight == 3)


def _given(rank: int, world_size: int, folder: str) -> tuple[float, list[float]]:
    """Rank 1 was in the last group, and rank 0 is new."""
    world = dist.group.WORLD
    assert world is not None
    kept = Kept("plan", 4, 50, rank_state(state(1)), ()) if rank else None
    model, optimizer = trained(0)
    beside = {"measured": torch.zeros(2, dtype=torch.float64)}
    checkpoints = Checkpointer(Store(folder), world, 5, keep=2)
    restore(model, optimizer, checkpoints, "plan", kept, list, lambda step: None, 5, world, beside)
    return model.weight[0, 0].item(), beside["measured"].tolist()  # type: ignore[union-attr, index, operator]


def test_a_rank_that_is_new_gets_what_another_one_has(tmp_path: Path) -> None:
    assert on_ranks(2, _given, str(tmp_path)) == [(1.0, [1.0, 1.0])] * 2
