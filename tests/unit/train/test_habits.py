"""Tests of habits of torch scripts, which the table in docs/migrate.md lists: each is right, or refused with the name of the call."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from habits import outcomes, plain
from habits_refused import REFUSED
from habits_right import RIGHT
from horovod_ranks import on_horovod_ranks
from ranks import on_ranks

from undula.parallel.spec import GradientSpec

WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "2 deterministic ranks": (2, {"deterministic": True}),
}
KEPT = dict(list(RIGHT.items())[:3])
"""Habits that call zero_grad or backward themselves, and are right."""
LIMIT_S = 600.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each world found for each habit. Processes that start for one habit only would take most of the time."""
    habits = {**RIGHT, **{row: habit for row, (habit, _) in REFUSED.items()}}
    return {
        world: on_ranks(size, partial(outcomes, **settings), tmp_path_factory.mktemp("world"), habits, limit_s=LIMIT_S)
        for world, (size, settings) in WORLDS.items()
    }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("row", RIGHT)
def test_a_habit_is_right_if_a_run_ends_as_the_plain_loop_does(row: str, world: str, found: Any) -> None:
    habit = RIGHT[row]
    with torch.random.fork_rng():
        expected = plain(habit())
    for runs in (each[row] for each in found[world]):
        assert not isinstance(runs, str), runs
        for weights in runs:
            assert weights == {name: pytest.approx(value, abs=habit.tolerance) for name, value in expected.items()}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("row", REFUSED)
def test_a_habit_is_refused_with_the_name_of_the_call(row: str, world: str, found: Any) -> None:
    _, names = REFUSED[row]
    for rank in found[world]:
        assert isinstance(rank[row], str), "it was not refused"
        assert names in rank[row]
        assert "\n" not in rank[row]


def test_a_sharded_model_keeps_its_gradients(tmp_path: Path) -> None:
    habits = {row: habit for row, (habit, _) in REFUSED.items()}
    for rank in on_ranks(2, partial(outcomes, is_sharded=True), tmp_path, {**habits, **KEPT}):
        # Torch cannot shard a ModuleDict, and shards communicate in a step of the optimizer themselves.
        others = {
            "a second copy of the weights, moved in the forward pass",
            "an optimizer with collectives in its step",
        }
        for row in REFUSED.keys() - others:
            sentences = (
                REFUSED[row][1],
                "while it was gathered",
                "the shape of a sharded",
                "the data of a sharded tensor",
                "was called in place of step.backward()",
            )
            assert any(sentence in rank[row] for sentence in sentences), rank[row]
        for row in KEPT:
            assert isinstance(rank[row], list), rank[row]


def test_other_engines_keep_their_gradients(tmp_path: Path) -> None:
    habits = {**{row: habit for row, (habit, _) in REFUSED.items()}, **KEPT}
    engines = {
        "horovod": on_horovod_ranks(2, partial(outcomes, engine="horovod"), tmp_path / "horovod", habits),
        "adasum": on_ranks(2, partial(outcomes, gradient=GradientSpec(reduce="adasum")), tmp_path / "adasum", habits),
    }
    for name, ranks in engines.items():
        for rank in ranks:
            for row, (_, names) in REFUSED.items():
                assert names in rank[row], name
            for row in KEPT:
                assert isinstance(rank[row], list), rank[row]


def test_the_table_of_habits_has_these_rows() -> None:
    text = (Path(__file__).parents[3] / "docs" / "migrate.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (right|refused) \|", text.split("## Habits of torch scripts")[1], re.M)
    assert len(rows) >= 25
    assert sorted(rows) == sorted([(row, "right") for row in RIGHT] + [(row, "refused") for row in REFUSED])
