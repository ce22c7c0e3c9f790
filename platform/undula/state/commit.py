"""Description of a committed checkpoint in its `commit.json`, and the check that its files are intact."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from undula.errors import CheckpointError
from undula.state.attempts import Lineage, read_lineage
from undula.state.goals import GoalSpec, ValidationResults, best_of
from undula.storage import Store

CHECKPOINTS = "checkpoints"
COMMIT = "commit.json"
FORMAT = 3


@dataclass(frozen=True)
class Commit:
    """A committed checkpoint, as its `commit.json` describes it."""

    folder: str
    """Folder of the checkpoint, relative to the run directory."""
    step: int
    """Number of committed steps that the checkpoint includes."""
    plan_digest: str
    tensors: Mapping[str, Any]
    """Tensors by name, each {"dtype", "shape", "strides", "key", "chunks"}: the name under which the files have it, and the number of the
    entry of `chunks` that says where its elements lie."""
    chunks: Sequence[Any]
    """Places of elements, each a list [[file, offsets, sizes]]. Tensors that are sharded alike share one, so that the size of `commit.json`
    does not follow the product of tensors and ranks."""
    values: Mapping[str, Any]
    """State other than tensors, by name."""
    files: Mapping[str, Any]
    """Files by name, each {"bytes", "sha256"}."""

    @property
    def attempt(self) -> int:
        """Number of the attempt that wrote the checkpoint."""
        return attempt_of(self.folder)

    @property
    def bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(int(file["bytes"]) for file in self.files.values())

    @property
    def results(self) -> ValidationResults:
        """Results of the run's validations up to this checkpoint."""
        results = ValidationResults()
        results.restore(self.values)
        return results

    def damage(self, store: Store, names: Sequence[str]) -> str | None:
        """Describe the first of these files that is damaged, or return None if all are intact."""
        for name in names:
            if not store.exists(f"{self.folder}/{name}"):
                return f"{store.url}/{self.folder}/{name} is missing"
            digest, num_bytes = sha256(), 0
            for chunk in store.read_chunks(f"{self.folder}/{name}"):
                digest.update(chunk)
                num_bytes += len(chunk)
            if num_bytes != self.files[name]["bytes"] or digest.hexdigest() != self.files[name]["sha256"]:
                return f"{store.url}/{self.folder}/{name} is damaged: its size or SHA-256 does not match the checkpoint's {COMMIT}"
        return None


def commit_json(body: dict[str, Any]) -> bytes:
    """Return the content of a `commit.json`: the body and its SHA-256."""
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def committed_folders(store: Store) -> list[str]:
    """Return the folders of all checkpoints that have a `commit.json`, whether they belong to the run or not."""
    names = [entry.name for entry in store.list(CHECKPOINTS)]
    return [name.removesuffix(f"/{COMMIT}") for name in names if name.endswith(f"/{COMMIT}")]


def find_commits(store: Store, lineage: Lineage | None = None) -> tuple[list[Commit], dict[str, str]]:
    """Find the committed checkpoints that belong to a run.

    A later attempt's checkpoint is never of an earlier step: the attempt began at a step that none of the earlier attempts' checkpoints
    exceeds, because others no longer belong to the run.

    Args:
        store: Run directory.
        lineage: Lineage of the run; None to read it.

    Returns:
        The checkpoints, newest first, and the damage to each unreadable `commit.json`, by folder.

    Raises:
        CheckpointError: A checkpoint has the format of another version of this library.
    """
    commits, damaged = [], {}
    lineage = lineage or read_lineage(store)
    for folder in committed_folders(store):
        if lineage.includes_checkpoint(folder, attempt_of(folder)):
            try:
                commits.append(_read_commit(store, folder))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                damaged[folder] = f"{store.url}/{folder}/{COMMIT} is damaged ({error})"
    return sorted(commits, key=lambda commit: (commit.attempt, commit.step), reverse=True), damaged


def best_commit(commits: Sequence[Commit], goal: GoalSpec) -> Commit | None:
    """Return the checkpoint whose validation had the best value; None if none of them was validated with a finite value."""
    results = {commit.folder: commit.results for commit in commits}
    validated = {folder: result for folder, result in results.items() if result.step == step_of(folder)}
    best = best_of(validated, goal)
    return next((commit for commit in commits if commit.folder == best), None)


def attempt_of(folder: str) -> int:
    """Return the attempt's number from the name of a checkpoint's folder; 0 if the name has none."""
    match = re.search(r"-a(\d+)$", folder)
    return int(match[1]) if match else 0


def step_of(folder: str) -> int:
    """Return the number of steps that a checkpoint includes from the name of its folder; 0 if the name has none."""
    match = re.search(r"step-(\d+)-a\d+$", folder)
    return int(match[1]) if match else 0


def _read_commit(store: Store, folder: str) -> Commit:
    body = json.loads(store.read(f"{folder}/{COMMIT}"))
    if body.pop("sha256") != _digest(body):
        raise ValueError("its SHA-256 does not match")
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"{store.url}/{folder} has checkpoint format {body['format']}, but this version of Undula reads format {FORMAT}; "
            "use the version that wrote it, set another name, or start over with --fresh"
        )
    return Commit(
        folder=folder, **{key: body[key] for key in ("step", "plan_digest", "tensors", "chunks", "values", "files")}
    )


def _digest(body: Mapping[str, Any]) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
