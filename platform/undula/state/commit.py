"""A committed checkpoint as its `commit.json` describes it: what it holds, where, and whether it is whole and fits a model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from undula.errors import CheckpointError, StorageError
from undula.storage import Store

CHECKPOINTS = "checkpoints"
COMMIT = "commit.json"
FORMAT = 1


@dataclass(frozen=True)
class Commit:
    """A committed checkpoint: what its `commit.json` says."""

    folder: str
    step: int
    """Steps that are in it."""
    plan_digest: str
    tensors: Mapping[str, Any]
    """By name: {"dtype", "shape", "chunks": [{"offsets", "sizes", "file", "key"}]}."""
    values: Mapping[str, Any]
    """State that is no tensor, by name."""
    files: Mapping[str, Any]
    """By name: {"bytes", "sha256"}."""

    def damage(self, store: Store, names: Sequence[str]) -> str | None:
        """What is wrong with the first damaged of these files; None where all are whole."""
        for name in names:
            try:
                data = store.read(f"{self.folder}/{name}")
            except StorageError as error:
                return str(error)
            if len(data) != self.files[name]["bytes"] or sha256(data).hexdigest() != self.files[name]["sha256"]:
                return f"{store.url}/{self.folder}/{name} is not what its checkpoint says (size or SHA-256)"
        return None


def find_commits(store: Store) -> list[Commit]:
    """The committed checkpoints of a run, newest first. One whose `commit.json` cannot be read is left out."""
    commits = []
    for entry in store.list(CHECKPOINTS):
        if entry.name.endswith(f"/{COMMIT}"):
            try:
                body = json.loads(store.read(entry.name))
                folder = entry.name.removesuffix(f"/{COMMIT}")
                if body["format"] == FORMAT:
                    fields = {key: body[key] for key in ("step", "plan_digest", "tensors", "values", "files")}
                    commits.append(Commit(folder=folder, **fields))
            except (ValueError, KeyError, TypeError):
                continue
    return sorted(commits, key=lambda commit: (commit.step, commit.folder), reverse=True)


def check_shapes(commit: Commit, shapes: Mapping[str, tuple[int, ...]], prefix: str) -> None:
    """Raise CheckpointError at the first tensor of the model that the checkpoint lacks, or has in another shape."""
    for name, shape in shapes.items():
        saved = commit.tensors.get(prefix + name)
        if saved is None:
            raise CheckpointError(f"{commit.folder} has no {name!r}, which the model has: it is of another model")
        if tuple(saved["shape"]) != tuple(shape):
            raise CheckpointError(
                f"{commit.folder} has {name!r} with shape {tuple(saved['shape'])}, the model has {tuple(shape)}: "
                "it is of another model; restore the former settings, give another name, or start over with --fresh"
            )
    if extra := [
        name for name in commit.tensors if name.startswith(prefix) and name.removeprefix(prefix) not in shapes
    ]:
        raise CheckpointError(
            f"{commit.folder} has {extra[0].removeprefix(prefix)!r}, which the model lacks: it is of another model"
        )
