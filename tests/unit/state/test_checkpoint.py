"""Tests of checkpoints in one process: they are complete or invisible, checked before loading, and never unpickled."""

import json
import os
from pathlib import Path
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


def state(value: float) -> dict[str, object]:
    return {"model.a": torch.full((2, 3), value), "model.n": torch.tensor(7), "optimizer.betas": [0.9, 0.95]}


def save(checkpoints: Checkpointer, step: int, value: float) -> None:
    checkpoints.save(step, "plan", rank_state(state(value)))
    assert checkpoints.wait() is None


def test_a_loaded_state_equals_the_saved_one(store: Store) -> None:
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=2)
    save(checkpoints, 10, 1.5)
    commit, damaged = checkpoints.newest_whole()
    assert commit is not None
    assert (commit.step, commit.plan_digest, damaged) == (10, "plan", {})
    into = state(0.0)
    assert checkpoints.load(commit, rank_state(into).pieces) == {"optimizer.betas": [0.9, 0.95]}
    assert torch.equal(into["model.a"], torch.full((2, 3), 1.5))


def test_training_can_change_its_tensors_during_a_save(store: Store) -> None:
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=2)
    live = state(1.0)
    checkpoints.save(1, "plan", rank_state(live))
    live["model.a"].fill_(99.0)
    assert checkpoints.wait() is None
    into = state(0.0)
    checkpoints.load(checkpoints.newest_whole()[0], rank_state(into).pieces)
    assert torch.equal(into["model.a"], torch.full((2, 3), 1.0))


def test_only_the_newest_checkpoints_are_kept(store: Store) -> None:
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=2)
    for step in (1, 2, 3):
        save(checkpoints, step, step)
    assert [commit.step for commit in find_commits(store)[0]] == [3, 2]
    assert not [entry for entry in store.list("checkpoints") if "step-00000001" in entry.name]


def test_a_checkpoint_is_saved_even_if_an_older_one_cannot_be_deleted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=1, not_removed=reasons.append)
    save(checkpoints, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", Mock(side_effect=StorageError("cannot delete")))
        save(checkpoints, 2, 2)
    assert reasons == ["cannot delete"]
    assert [commit.step for commit in find_commits(store)[0]] == [2, 1]
    save(checkpoints, 3, 3)
    assert [commit.step for commit in find_commits(store)[0]] == [3]


def test_a_checkpoint_without_its_commit_is_invisible(store: Store) -> None:
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=3)
    save(checkpoints, 1, 1)
    save(checkpoints, 2, 2)
    newest = find_commits(store)[0][0]
    store.delete(f"{newest.folder}/{COMMIT}")
    assert [commit.step for commit in find_commits(store)[0]] == [1]
    checkpoints.remove_uncommitted()
    assert {entry.name.split("/")[1] for entry in store.list("checkpoints")} == {"step-00000001-a1"}


def test_the_commit_comes_last_and_after_the_ledger(store: Store) -> None:
    seen = []

    def before_commit() -> None:
        seen.append([entry.name.rpartition("/")[2] for entry in store.list("checkpoints")])

    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=2, before_commit=before_commit)
    save(checkpoints, 5, 1)
    assert seen == [["rank-00000.safetensors"]]


@pytest.mark.parametrize("harm", ["flip a bit", "cut", "delete"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(store: Store, harm: str) -> None:
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=3)
    save(checkpoints, 1, 1)
    save(checkpoints, 2, 2)
    victim = f"{find_commits(store)[0][0].folder}/rank-00000.safetensors"
    data = bytearray(store.read(victim))
    if harm == "flip a bit":
        data[-1] ^= 1
        store.write(victim, bytes(data))
    elif harm == "cut":
        store.write(victim, bytes(data[:-1]))
    else:
        store.delete(victim)
    commit, damaged = checkpoints.newest_whole()
    assert commit is not None
    assert commit.step == 1
    assert list(damaged) == [victim.rpartition("/")[0]]
    assert victim in next(iter(damaged.values()))


@pytest.mark.parametrize("harm", ["edit", "cut", "empty"])
def test_a_damaged_commit_is_named_and_skipped(store: Store, harm: str) -> None:
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=3)
    save(checkpoints, 1, 1)
    save(checkpoints, 2, 2)
    folder = "checkpoints/step-00000002-a1"
    text = store.read(f"{folder}/{COMMIT}")
    harmed = {"edit": text.replace(b'"step": 2', b'"step": 9'), "cut": text[:-20], "empty": b""}[harm]
    store.write(f"{folder}/{COMMIT}", harmed)
    commit, damaged = checkpoints.newest_whole()
    assert commit is not None
    assert commit.step == 1
    assert list(damaged) == [folder]
    assert f"{folder}/{COMMIT}" in damaged[folder]


def test_a_damaged_checkpoint_displaces_no_intact_one_and_is_deleted_after_the_next_save(store: Store) -> None:
    previous = Checkpointer(store, dist.group.WORLD, attempt=1, keep=2)
    save(previous, 100, 1)
    save(previous, 200, 2)
    store.write("checkpoints/step-00000200-a1/rank-00000.safetensors", b"")
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=2, keep=1)
    commit, _ = checkpoints.newest_whole()
    assert commit is not None
    assert (commit.step, [left.step for left in find_commits(store)[0]]) == (100, [200, 100])
    save(checkpoints, 150, 3)
    assert [left.step for left in find_commits(store)[0]] == [150]


def test_a_checkpoint_of_another_version_is_refused_and_kept(store: Store) -> None:
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=3)
    save(checkpoints, 1, 1)
    path = "checkpoints/step-00000001-a1/commit.json"
    body = json.loads(store.read(path))
    del body["sha256"]
    store.write(path, commit_json({**body, "format": 99}))
    with pytest.raises(
        CheckpointError, match=r"step-00000001-a1 has checkpoint format 99, .* reads format 2; use the version"
    ):
        checkpoints.newest_whole()
    assert store.exists(path)


def test_an_attempt_does_not_delete_the_unfinished_checkpoint_of_a_later_attempt(store: Store) -> None:
    for attempt in (1, 2, 3):
        store.write(f"checkpoints/step-00000009-a{attempt}/rank-00000.safetensors", b"unfinished")
    Checkpointer(store, dist.group.WORLD, attempt=2, keep=1).begin(step=0)
    assert [entry.name for entry in store.list("checkpoints")] == [
        "checkpoints/step-00000009-a3/rank-00000.safetensors"
    ]


def test_an_attempt_that_has_not_begun_deletes_nothing_of_earlier_ones(store: Store) -> None:
    store.write("checkpoints/step-00000009-a1/rank-00000.safetensors", b"another attempt still writes")
    Checkpointer(store, dist.group.WORLD, attempt=2, keep=1).remove_uncommitted()
    assert store.exists("checkpoints/step-00000009-a1/rank-00000.safetensors")


def test_the_checkpoint_of_the_later_attempt_is_newer_even_if_an_earlier_one_had_come_further(store: Store) -> None:
    for attempt, step in ((9, 8), (10, 7)):
        save(Checkpointer(store, dist.group.WORLD, attempt=attempt, keep=5), step, attempt)
    commit, _ = Checkpointer(store, dist.group.WORLD, attempt=11, keep=5).newest_whole()
    assert commit is not None
    assert commit.attempt == 10


def test_tied_weights_are_saved_and_loaded(store: Store) -> None:
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=1)
    tied = torch.arange(6.0).view(2, 3)
    checkpoints.save(1, "plan", rank_state({"model.embedding": tied, "model.head": tied, "model.part": tied[1]}))
    assert checkpoints.wait() is None
    into = {"model.embedding": torch.zeros(2, 3), "model.head": torch.zeros(2, 3), "model.part": torch.zeros(3)}
    checkpoints.load(checkpoints.newest_whole()[0], rank_state(into).pieces)
    assert torch.equal(into["model.embedding"], tied)
    assert torch.equal(into["model.head"], tied)
    assert torch.equal(into["model.part"], tied[1])


def test_a_failed_save_is_reported_and_keeps_the_previous_checkpoint(store: Store) -> None:
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=1)
    save(checkpoints, 1, 1)
    folder = Path(store.path("checkpoints"))
    (folder / "step-00000002-a1").touch()  # blocks the folder of the next checkpoint
    checkpoints.save(2, "plan", rank_state(state(2)))
    assert checkpoints.wait() is not None
    commit, _ = checkpoints.newest_whole()
    assert commit is not None
    assert commit.step == 1


def test_a_pickle_in_place_of_a_tensor_file_is_never_loaded(store: Store, tmp_path: Path) -> None:
    """The attacker has also replaced the checksums in the commit."""
    import pickle
    from hashlib import sha256

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path}/exploded",)

    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=1)
    save(checkpoints, 1, 1)
    folder = find_commits(store)[0][0].folder
    bomb = pickle.dumps(Bomb())
    body = json.loads(store.read(f"{folder}/{COMMIT}"))
    body["files"]["rank-00000.safetensors"] = {"bytes": len(bomb), "sha256": sha256(bomb).hexdigest()}
    store.write(f"{folder}/rank-00000.safetensors", bomb)
    del body["sha256"]
    store.write(f"{folder}/{COMMIT}", commit_json(body))
    commit, _ = checkpoints.newest_whole()
    with pytest.raises(CheckpointError, match="cannot be loaded: it is not a safetensors file"):
        checkpoints.load(commit, rank_state(state(0)).pieces)
    assert not (tmp_path / "exploded").exists()


def test_a_state_that_the_ranks_do_not_hold_completely_is_not_committed(store: Store) -> None:
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=1)
    half = Piece(torch.ones(2), (4,), (2,), is_replicated=False)
    checkpoints.save(1, "plan", RankState({"model.a": half}, {}))
    assert str(checkpoints.wait()).startswith("the ranks do not hold all of 'model.a'")
    assert find_commits(store) == ([], {})


def test_a_checkpoint_that_lacks_a_part_of_a_tensor_is_refused(store: Store) -> None:
    checkpoints = Checkpointer(store, dist.group.WORLD, attempt=1, keep=1)
    save(checkpoints, 1, 1.0)
    (commit,), _ = find_commits(store)
    commit.tensors["model.a"]["chunks"].clear()
    with pytest.raises(CheckpointError, match=r"step-00000001-a1 lacks a part of 'model\.a'"):
        checkpoints.load(commit, rank_state(state(0.0)).pieces)
