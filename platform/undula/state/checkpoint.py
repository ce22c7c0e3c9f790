"""Durable checkpoints: torch.distributed.checkpoint plans who writes what; the bytes are safetensors and JSON, never a pickle.

A checkpoint is a folder `checkpoints/step-00000100-a3/` (step, attempt) with one safetensors file a rank and `commit.json`, which
is written last: without it the folder is invisible. `commit.json` names every tensor's shape and place, the values that are no
tensors, and the size and SHA-256 of every file, so that damage is found before it is loaded.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from undula.errors import CheckpointError
from undula.state.commit import CHECKPOINTS, COMMIT, FORMAT, Commit, attempt_of, find_commits
from undula.state.retention import superseded
from undula.storage import Store

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Found = TypeVar("Found")


class Checkpointer:
    """Saves and restores the state of a run in its directory. Every rank holds one and makes the same calls.

    Args:
        store: the run directory.
        group: the ranks, for what is agreed on between saves; must reach CPU tensors.
        attempt: number of this attempt, so that two attempts never write to one folder.
        keep: committed checkpoints that stay.
        before_commit: called by rank 0 before a checkpoint becomes visible; flushes the ledger.
        after_commit: called by rank 0 with the step and the seconds that the save took.

    Both are called from the thread that saves.
    """

    def __init__(
        self,
        store: Store,
        group: dist.ProcessGroup,
        attempt: int,
        keep: int,
        before_commit: Callable[[], None] = lambda: None,
        after_commit: Callable[[int, float], None] = lambda step, seconds: None,
    ):
        self._store = store
        self._attempt = attempt
        self._keep = keep
        self._before_commit = before_commit
        self._after_commit = after_commit
        self._saving: Future[Metadata] | None = None
        self._group = group
        self._saving_step = 0
        self._damaged: set[str] = set()
        self._saving_group: dist.ProcessGroup | None = None

    @property
    def url(self) -> str:
        """Of the run directory."""
        return self._store.url

    def save(self, step: int, plan_digest: str, state: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint; the state is copied before this returns, the rest happens in a thread.

        Args:
            step: steps that are in the state.
            plan_digest: identity of the run's plan.
            state: tensors, sharded ones too, and JSON values, by name.
        """
        from torch.distributed.checkpoint.state_dict_saver import async_save

        from undula.state.safetensors_io import SafetensorsWriter

        assert self._saving is None, "wait() for the former save first"
        began = time.monotonic()
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        values = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        writer = SafetensorsWriter(
            self._store,
            folder=f"{CHECKPOINTS}/step-{step:08d}-a{self._attempt}",
            header={"format": FORMAT, "step": step, "plan_digest": plan_digest, "values": values},
            before_commit=self._before_commit,
            after_commit=lambda: self._committed(step, time.monotonic() - began),
        )
        # A group of its own, as it works in a thread beside the training's collectives; and only for as long as it is needed,
        # as gloo's threads look around a hundred times a second.
        self._saving_group = dist.new_group(backend="gloo")
        saving = async_save(tensors, storage_writer=writer, process_group=self._saving_group)
        assert isinstance(saving, Future)
        self._saving, self._saving_step = saving, step

    @property
    def has_finished_here(self) -> bool:
        """Whether there is a save to collect with `wait()` that this rank is done with."""
        return self._saving is not None and self._saving.done()

    @property
    def saving_step(self) -> int | None:
        """The step of the save that is to be collected with `wait()`, if there is one; the same on every rank."""
        return None if self._saving is None else self._saving_step

    def wait(self) -> BaseException | None:
        """Wait for the save under way; what went wrong with it, if anything. All ranks call it at the same step."""
        if self._saving is None:
            return None
        error = self._saving.exception()
        dist.destroy_process_group(self._saving_group)
        self._saving = self._saving_group = None
        return error

    def newest_whole(self) -> tuple[Commit | None, dict[str, str]]:
        """The newest checkpoint without damage, and what is wrong with others, by folder; the same answer on every rank.

        The ranks check the files together, each its share. Damaged ones stay until there is a newer checkpoint, and are not counted among
        those to keep.
        """
        rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        commits, unreadable = self._from_rank_0(lambda: find_commits(self._store))
        damaged = dict(unreadable)
        for commit in commits:
            names = sorted(commit.files)[rank::world_size]
            found: list[str | None] = [None] * world_size
            dist.all_gather_object(found, commit.damage(self._store, names), group=self._group)
            problems = [problem for problem in found if problem]
            if not problems:
                break
            damaged[commit.folder] = problems[0]
        self._damaged = set(damaged)
        return next((commit for commit in commits if commit.folder not in damaged), None), damaged

    def load(self, commit: Commit, state: Mapping[str, Any]) -> dict[str, Any]:
        """Load into the tensors of `state`, in place; returns the values that are no tensors."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        from undula.state.safetensors_io import SafetensorsReader

        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            saved = commit.tensors.get(name)
            if saved is None or tuple(saved["shape"]) != tuple(tensor.shape):
                raise CheckpointError(f"{commit.folder} does not fit: {name!r} is missing or has another shape")
        try:
            load(tensors, storage_reader=SafetensorsReader(self._store, commit), process_group=self._group)
        except CheckpointException as error:  # torch's, and not an Exception
            reason = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
            raise CheckpointError(f"{self._store.url}/{commit.folder} cannot be loaded: {reason}") from error
        return dict(commit.values)

    def remove_uncommitted(self) -> None:
        """Delete what attempts up to this one began to write and never committed. For rank 0, while no save is under way."""
        names = [entry.name for entry in self._store.list(CHECKPOINTS)]
        whole = {name.removesuffix(f"/{COMMIT}") for name in names if name.endswith(f"/{COMMIT}")}
        begun = {name.rpartition("/")[0] for name in names} - whole
        self._remove(folder for folder in begun if attempt_of(folder) <= self._attempt)

    def _remove(self, folders: Iterable[str]) -> None:
        """Delete checkpoints, each at once for readers."""
        for folder in folders:
            self._store.delete(f"{folder}/{COMMIT}")  # first, so that what is left is invisible
            self._store.delete(folder)

    def _committed(self, step: int, seconds: float) -> None:
        self._after_commit(step, seconds)
        self.remove_uncommitted()
        whole = [commit for commit in find_commits(self._store)[0] if commit.folder not in self._damaged]
        self._remove(superseded([(commit.step, commit.attempt, commit.folder) for commit in whole], self._keep))
        self._remove(self._damaged)  # now that there is one that is newer than what could be loaded instead
        self._damaged = set()

    def _from_rank_0(self, find: Callable[[], Found]) -> Found:
        box: list[Any] = [find() if dist.get_rank(self._group) == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return cast(Found, box[0])
