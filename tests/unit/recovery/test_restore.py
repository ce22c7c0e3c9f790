"""Tests that a group starts with the newest state, which is that of the last step of the last attempt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn

from undula.parallel.layout import Layout, join_layout
from undula.recovery.live_state import LiveState
from undula.recovery.offers import Answer, Offer, chosen, origin_of
from undula.recovery.restore import Restored, Restorer
from undula.recovery.snapshot import find_snapshots
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.recovery.worker_state import HeldState
from undula.state.checkpoint import Checkpointer
from undula.state.model_state import model_and_optimizer_state
from undula.state.pieces import Holding, TensorSpec, piece_of, rank_state
from undula.storage import Store

pytestmark = pytest.mark.usefixtures("process_group")
Age = tuple[int, int]


def trained(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def state(value: float) -> dict[str, Any]:
    """Return the state of a model, its optimizer and an additional tensor."""
    return {**model_and_optimizer_state(*trained(value)), "measured": torch.full((2,), value, dtype=torch.float64)}


def restored(
    folder: Path, held: Age | None, snapshot: Age | None, saved: Age | None, attempt: int
) -> tuple[Restored, float, list[int]]:
    """Restore a group of this attempt. The weight is then 1 (from the held state), 2 (snapshot), 3 (checkpoint) or 0 (fresh)."""
    layout = join_layout(0, 1, torch.device("cpu"))
    mine = HeldState("plan", *held, rank_state(state(1)), ()) if held else None
    if snapshot:
        writer = SnapshotWriter(folder / "memory", "plan", snapshot[0])
        writer.begin(snapshot[1], rank_state(state(2)), {}, [])
        writer.close()
    if saved:
        former = Checkpointer(Store(str(folder)), layout.control, saved[0], keep=2)
        former.save(saved[1], "plan", rank_state(state(3)))
        assert former.wait() is None
    begun: list[int] = []

    def find() -> list[Offer]:
        return list(map(Offer, find_snapshots(folder / "memory", "plan")))

    result, weight, measured = restore_into(0, folder, attempt, layout, mine, find, begun.append)
    assert measured == [weight] * 2
    return result, weight, begun


def restore_into(
    value: float,
    folder: Path,
    attempt: int,
    layout: Layout,
    held: HeldState | None,
    find: Callable[[], list[Offer]],
    begin: Callable[[int], None],
) -> tuple[Restored, float, list[float]]:
    """Restore a new model with an additional tensor, and also return its first weight and that tensor."""
    model, optimizer = trained(value)
    measured = piece_of(torch.zeros(2, dtype=torch.float64))
    live = LiveState(model, optimizer, lambda: {"measured": measured})
    checkpoints = Checkpointer(Store(str(folder)), layout.control, attempt, keep=2)
    result = Restorer(live, checkpoints, "plan", attempt, layout, find, begin).restore(held)
    return result, model.weight[0, 0].item(), measured.tensor.tolist()  # type: ignore[union-attr, index, operator]


@pytest.mark.parametrize(
    ("held", "snapshot", "saved", "weight", "step"),
    [
        (None, None, None, 0, 0),
        ((4, 50), (4, 50), (4, 40), 1, 50),
        (None, (4, 50), (4, 40), 2, 50),
        (None, (4, 40), (4, 50), 3, 50),
        # An earlier attempt had come further, but the run continued without it, so its steps do not count.
        ((2, 90), (4, 50), (4, 40), 2, 50),
        ((2, 90), None, (4, 40), 3, 40),
        (None, (2, 90), (4, 40), 3, 40),
        # A state of an earlier attempt is still the newest if the later attempts committed nothing.
        ((2, 90), (2, 80), (1, 40), 1, 90),
    ],
)
def test_the_newest_state_of_the_last_attempt_is_taken(
    tmp_path: Path, held: Age | None, snapshot: Age | None, saved: Age | None, weight: float, step: int
) -> None:
    result, found, begun = restored(tmp_path, held, snapshot, saved, attempt=5)
    assert (found, result.step, begun) == (weight, step, [step])
    assert result.is_checkpoint == (weight == 3)


def _given(rank: int, world_size: int, folder: str) -> tuple[float, list[float]]:
    """Restore two ranks, of which rank 1 was in the last group and rank 0 is new."""
    held = HeldState("plan", 4, 50, rank_state(state(1)), ()) if rank else None
    layout = join_layout(rank, world_size, torch.device("cpu"))
    _, weight, measured = restore_into(0, Path(folder), 5, layout, held, list, lambda step: None)
    return weight, measured


def test_a_new_rank_gets_the_state_of_another_rank(tmp_path: Path) -> None:
    assert on_ranks(2, _given, str(tmp_path)) == [(1.0, [1.0, 1.0])] * 2


HALVES = [Holding({"weight": TensorSpec("float32", (2,))}, {"weight": ((row,), (1,))}) for row in (0, 1)]


@pytest.mark.parametrize(
    ("answers", "origin"),
    [
        ([[((1, 8), HALVES[0], "node"), ((1, 8), HALVES[1], "head")]], "node and head"),
        ([[((1, 8), HALVES[0], "node")], [((1, 8), HALVES[1], "node"), ((1, 8), HALVES[0], "head")]], "node"),
        ([[((1, 8), HALVES[0], "node")], [((1, 8), None, "head"), ((1, 9), None, "worker")]], "head"),
    ],
)
def test_all_places_are_named_from_which_the_pieces_come(answers: Any, origin: str) -> None:
    sources = [[Answer(*each) for each in of_source] for of_source in answers]
    used = [sources[source][place] for source, places in enumerate(chosen(sources, (1, 8))) for place in places]
    assert origin_of(used) == origin
