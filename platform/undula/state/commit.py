"""A committed checkpoint as its `commit.json` describes it: what it holds, where, and whether it is whole and fits a model."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from undula.errors import CheckpointError
from undula.storage import Store

CHECKPOINTS = "checkpoints"
COMMIT = "commit.json"
FORMAT = 2


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

    @property
    def attempt(self) -> int:
        """The attempt that wrote it."""
        return attempt_of(self.folder)

    def damage(self, store: Store, names: Sequence[str]) -> str | None:
        """What is wrong with the first damaged of these files; None where all are whole."""
        for name in names:
            if not store.exists(f"{self.folder}/{name}"):
                return f"{store.url}/{self.folder}/{name} is gone"
            data = store.read(f"{self.folder}/{name}")
            if len(data) != self.files[name]["bytes"] or sha256(data).hexdigest() != self.files[name]["sha256"]:
                return f"{store.url}/{self.folder}/{name} is not what its checkpoint says (size or SHA-256)"
        return None


def commit_json(body: dict[str, Any]) -> bytes:
    """The content of a `commit.json`: the body, and a SHA-256 of it."""
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def find_commits(store: Store) -> tuple[list[Commit], dict[str, str]]:
    """The committed checkpoints of a run, newest first; and what is wrong with those of an unreadable `commit.json`, by folder.

    Raises:
        CheckpointError: one is of another version of this library.
    """
    commits, damaged = [], {}
    for entry in store.list(CHECKPOINTS):
        if entry.name.endswith(f"/{COMMIT}"):
            folder = entry.name.removesuffix(f"/{COMMIT}")
            try:
                commits.append(_read_commit(store, folder))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                damaged[folder] = f"{store.url}/{entry.name} is not what was written ({error})"
    return sorted(commits, key=lambda commit: (commit.step, commit.attempt), reverse=True), damaged


def attempt_of(folder: str) -> int:
    """The attempt in the name of a checkpoint's folder."""
    match = re.search(r"-a(\d+)$", folder)
    return int(match[1]) if match else 0


def _read_commit(store: Store, folder: str) -> Commit:
    body = json.loads(store.read(f"{folder}/{COMMIT}"))
    if body.pop("sha256") != _digest(body):
        raise ValueError("SHA-256")
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"{store.url}/{folder} is of format {body['format']}, and this version reads {FORMAT}: "
            "use the version that wrote it, give another name, or start over with --fresh"
        )
    return Commit(folder=folder, **{key: body[key] for key in ("step", "plan_digest", "tensors", "values", "files")})


def _digest(body: Mapping[str, Any]) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


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
