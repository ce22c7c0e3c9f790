"""Tests of checkpoints in one process: they are complete or invisible, checked before loading, and never unpickled."""

import json
import os
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from undula.errors import CheckpointError, StorageError
from undula.state.checkpoint import Checkpointer
from undula.state.commit import COMMIT, commit_json, find_commits
from undula.state.pieces import Piece, RankState, rank_state
from undula.storage import Store

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def state(value: float) -> dict[str, Any]:
    return {"model.a": torch.full((2, 3), value), "model.n": torch.tensor(7), "optimizer.betas": [0.9, 0.95]}


def writer(store: Store, attempt: int = 1, keep: int = 3, **callbacks: Any) -> Checkpointer:
    return Checkpointer(store, dist.group.WORLD, attempt, keep, **callbacks)


def save(checkpoints: Checkpointer, *steps: int) -> None:
    """Save a checkpoint of each step, whose weights are the number of the step."""
    for step in steps:
        checkpoints.save(step, "plan", rank_state(state(step)))
        assert checkpoints.wait() is None


def newest(checkpoints: Checkpointer) -> tuple[int, dict[str, str]]:
    """Return the step of the newest undamaged checkpoint, and the damage of newer ones."""
    commit, damaged = checkpoints.newest_whole()
    assert commit is not None
    return commit.step, damaged


def steps(store: Store) -> list[int]:
    return [commit.step for commit in find_commits(store)[0]]


def test_a_loaded_state_equals_the_saved_one_although_training_goes_on(store: Store) -> None:
    """Two names have the same tensor, and a third one a part of it."""
    checkpoints, tied = writer(store), torch.arange(6.0).view(2, 3)
    live = {**state(1.5), "model.embedding": tied, "model.head": tied, "model.part": tied[1]}
    expected = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in live.items()}
    checkpoints.save(10, "plan", rank_state(live))
    for tensor in (live["model.a"], tied):
        tensor.fill_(99.0)
    assert checkpoints.wait() is None
    commit, damaged = checkpoints.newest_whole()
    assert commit is not None
    assert (commit.step, commit.plan_digest, damaged) == (10, "plan", {})
    into = {name: torch.zeros_like(value) for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert checkpoints.load(commit, rank_state(into).pieces) == {"optimizer.betas": [0.9, 0.95]}
    assert all(torch.equal(value, expected[name]) for name, value in into.items())


def test_only_the_newest_checkpoints_are_kept(store: Store) -> None:
    save(writer(store, keep=2), 1, 2, 3)
    assert steps(store) == [3, 2]
    assert not [entry for entry in store.list("checkpoints") if "step-00000001" in entry.name]


def test_a_checkpoint_is_saved_even_if_an_older_one_cannot_be_deleted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    checkpoints = writer(store, keep=1, not_removed=reasons.append)
    save(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", Mock(side_effect=StorageError("cannot delete")))
        save(checkpoints, 2)
    assert reasons == ["cannot delete"]
    assert steps(store) == [2, 1]
    save(checkpoints, 3)
    assert steps(store) == [3]


def test_a_checkpoint_without_its_commit_is_invisible(store: Store) -> None:
    checkpoints = writer(store)
    save(checkpoints, 1, 2)
    store.delete(f"{find_commits(store)[0][0].folder}/{COMMIT}")
    assert steps(store) == [1]
    checkpoints.remove_uncommitted()
    assert {entry.name.split("/")[1] for entry in store.list("checkpoints")} == {"step-00000001-a1"}


def test_the_commit_comes_last_and_after_the_ledger(store: Store) -> None:
    seen = []

    def before_commit() -> None:
        seen.append([entry.name.rpartition("/")[2] for entry in store.list("checkpoints")])

    save(writer(store, before_commit=before_commit), 5)
    assert seen == [["rank-00000.safetensors"]]


HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "flip a bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut": lambda data: data[:-1],
    "edit": lambda data: data.replace(b'"step": 2', b'"step": 9'),
    "empty": lambda data: b"",
    "delete": lambda data: None,
}


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        *(("rank-00000.safetensors", harm) for harm in ("flip a bit", "cut", "empty", "delete")),
        *((COMMIT, harm) for harm in ("edit", "cut", "empty")),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(store: Store, file: str, harm: str) -> None:
    checkpoints, folder = writer(store), "checkpoints/step-00000002-a1"
    save(checkpoints, 1, 2)
    harmed = HARMS[harm](store.read(f"{folder}/{file}"))
    if harmed is None:
        store.delete(f"{folder}/{file}")
    else:
        store.write(f"{folder}/{file}", harmed)
    step, damaged = newest(checkpoints)
    assert (step, list(damaged)) == (1, [folder])
    assert f"{folder}/{file}" in damaged[folder]


def test_a_damaged_checkpoint_displaces_no_intact_one_and_is_deleted_after_the_next_save(store: Store) -> None:
    save(writer(store), 100, 200)
    store.write("checkpoints/step-00000200-a1/rank-00000.safetensors", b"")
    checkpoints = writer(store, attempt=2, keep=1)
    assert newest(checkpoints)[0] == 100
    assert steps(store) == [200, 100]
    save(checkpoints, 150)
    assert steps(store) == [150]


def rewrite(store: Store, folder: str, **changes: Any) -> None:
    """Change a commit, with a checksum that fits."""
    body = json.loads(store.read(f"{folder}/{COMMIT}"))
    del body["sha256"]
    store.write(f"{folder}/{COMMIT}", commit_json({**body, **changes}))


def test_a_checkpoint_of_another_version_is_refused_and_kept(store: Store) -> None:
    checkpoints = writer(store)
    save(checkpoints, 1)
    rewrite(store, "checkpoints/step-00000001-a1", format=99)
    with pytest.raises(
        CheckpointError, match=r"step-00000001-a1 has checkpoint format 99, .* reads format 3; use the version"
    ):
        checkpoints.newest_whole()
    assert store.exists(f"checkpoints/step-00000001-a1/{COMMIT}")


def test_an_attempt_deletes_unfinished_checkpoints_of_earlier_ones_only_once_it_has_begun(store: Store) -> None:
    for attempt in (1, 2, 3):
        store.write(f"checkpoints/step-00000009-a{attempt}/rank-00000.safetensors", b"unfinished")
    checkpoints = writer(store, attempt=2)
    checkpoints.remove_uncommitted()
    assert [entry.name[-24] for entry in store.list("checkpoints")] == ["1", "3"]
    checkpoints.begin(step=0)
    assert [entry.name[-24] for entry in store.list("checkpoints")] == ["3"]


def test_the_checkpoint_of_the_later_attempt_is_newer_even_if_an_earlier_one_had_come_further(store: Store) -> None:
    save(writer(store, attempt=9), 8)
    save(writer(store, attempt=10), 7)
    assert newest(writer(store, attempt=11))[0] == 7


def test_a_failed_save_is_reported_and_keeps_the_previous_checkpoint(store: Store) -> None:
    checkpoints = writer(store, keep=1)
    save(checkpoints, 1)
    Path(store.path("checkpoints/step-00000002-a1")).touch()  # blocks the folder of the next checkpoint
    checkpoints.save(2, "plan", rank_state(state(2)))
    assert checkpoints.wait() is not None
    assert newest(checkpoints)[0] == 1


def test_a_pickle_in_place_of_a_tensor_file_is_never_loaded(store: Store, tmp_path: Path) -> None:
    """The attacker has also replaced the checksums in the commit."""

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path}/exploded",)

    checkpoints, folder, bomb = writer(store), "checkpoints/step-00000001-a1", pickle.dumps(Bomb())
    save(checkpoints, 1)
    store.write(f"{folder}/rank-00000.safetensors", bomb)
    files = {"rank-00000.safetensors": {"bytes": len(bomb), "sha256": sha256(bomb).hexdigest()}}
    rewrite(store, folder, files=files)
    commit, _ = checkpoints.newest_whole()
    with pytest.raises(CheckpointError, match="cannot be loaded: it is not a safetensors file"):
        checkpoints.load(commit, rank_state(state(0)).pieces)
    assert not (tmp_path / "exploded").exists()


def test_a_state_that_the_ranks_do_not_hold_completely_is_not_committed(store: Store) -> None:
    checkpoints, half = writer(store), Piece(torch.ones(2), (4,), (2,), is_replicated=False)
    checkpoints.save(1, "plan", RankState({"model.a": half}, {}))
    assert str(checkpoints.wait()).startswith("the ranks do not hold all of 'model.a'")
    assert find_commits(store) == ([], {})


def test_a_checkpoint_that_lacks_a_part_of_a_tensor_is_refused(store: Store) -> None:
    checkpoints = writer(store)
    save(checkpoints, 1)
    (commit,), _ = find_commits(store)
    commit.chunks[commit.tensors["model.a"]["chunks"]].clear()
    with pytest.raises(CheckpointError, match=r"step-00000001-a1 lacks a part of 'model\.a'"):
        checkpoints.load(commit, rank_state(state(0.0)).pieces)
