"""Durable checkpoints, whose files are safetensors and JSON, never pickles.

A checkpoint is a folder such as `checkpoints/step-00000100-a3/` (step 100 of attempt 3) with one safetensors file per rank and a
`commit.json`, which is written last: readers ignore a folder without it. `commit.json` lists the dtype, the shape and the place of every
tensor, the values that are not tensors, and the size and SHA-256 of every file, so that damage is found before anything is loaded.

Also here: retention policy for checkpoints.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from undula.errors import CheckpointError, StorageError, SupersededError, UndulaError
from undula.state.attempts import EVERYTHING, Lineage, begin, read_lineage, require_newest
from undula.state.checkpoint_files import (
    Entries,
    WrittenFile,
    entries_of,
    read_pieces,
    share_of,
    tied_names,
    write_share,
)
from undula.state.commit import (
    CHECKPOINTS,
    COMMIT,
    FORMAT,
    Commit,
    attempt_of,
    best_commit,
    commit_json,
    committed_folders,
    find_commits,
    step_of,
)
from undula.state.extents import Extent, Names
from undula.state.goals import GoalSpec
from undula.state.pieces import Holding, Piece, RankState, Table
from undula.state.spec import size
from undula.storage import Store


def superseded(checkpoints: Sequence[tuple[int, int, str]], keep: int, best: str | None = None) -> list[str]:
    """Return the names of the checkpoints that are neither the best one nor among the `keep` newest, oldest first.

    Args:
        checkpoints: Tuple (attempt, step, name) of each checkpoint.
        keep: Number of newest checkpoints to keep.
        best: Name of the best checkpoint; None if it is not kept.
    """
    newest_last = sorted(checkpoints)
    return [name for _, _, name in newest_last[: max(len(newest_last) - keep, 0)] if name != best]


SAVING = "undula: checkpoints"
"""Description of the process groups whose collectives run in a thread beside the training."""


class Checkpointer:
    """Saves and restores the state of a run in its directory. Every rank has an instance and makes the same calls.

    Args:
        store: Run directory.
        group: Process group of the ranks, in which they agree between saves. It must support CPU tensors.
        attempt: Number of this attempt, which keeps two attempts from writing to one folder.
        keep: Number of committed checkpoints to keep.
        before_commit: Callback that rank 0 calls before a checkpoint becomes visible, to flush the ledger. It runs in the saving thread.
        after_commit: Callback to which rank 0 passes the step and the duration of the save in seconds. It runs in the saving thread.
        not_removed: Callback to which rank 0 passes the reason why old checkpoints could not be deleted. It runs in the saving thread.
        before: Lineage that the attempt found after it had claimed its number.
        keep_best: Goal whose best checkpoint is kept beside the newest ones; None to keep only these.
        timeout: Time limit of the collectives of a save; None for torch's default.

    Attributes:
        newest: Step of the newest committed checkpoint, as rank 0 knows it; None if there is none.
    """

    def __init__(
        self,
        store: Store,
        group: dist.ProcessGroup,
        attempt: int,
        keep: int,
        before_commit: Callable[[], None] = lambda: None,
        after_commit: Callable[[int, float], None] = lambda step, seconds: None,
        not_removed: Callable[[str], None] = lambda reason: None,
        before: Lineage = EVERYTHING,
        keep_best: GoalSpec | None = None,
        timeout: timedelta | None = None,
    ):
        self._store = store
        self._attempt = attempt
        self._keep = keep
        self._before_commit = before_commit
        self._after_commit = after_commit
        self._not_removed = not_removed
        self._before = before
        self._keep_best = keep_best
        self._timeout = timeout
        self._has_begun = False
        self.newest: int | None = None
        self._saving: Future[None] | None = None
        self._is_abandoned = threading.Event()
        self._group = group
        self._saving_step = self._bytes = 0
        self._damaged: set[str] = set()
        self._saving_group: dist.ProcessGroup | None = None

    @property
    def url(self) -> str:
        """URL of the run directory."""
        return self._store.url

    def save(self, step: int, plan_digest: str, state: RankState) -> None:
        """Start writing a checkpoint. The state is copied before this method returns; a thread does the rest.

        Args:
            step: Number of steps that the state includes.
            plan_digest: Digest of the run's plan.
            state: Part of the state that this rank holds. The ranks must hold the whole state together, and its values must be JSON.
        """
        assert self._saving is None, "call wait() for the previous save first"
        began = time.monotonic()
        tied = tied_names(state.pieces)
        pieces = {name: piece for name, piece in state.pieces.items() if name not in tied}
        expected = {name: spec for name, spec in state.expected.items() if name not in tied}
        own, names = self._own_share(expected, pieces)
        share = {name: _copied(pieces[name].tensor) for name in own}
        extent, _ = Extent.of(Holding(expected, {name: pieces[name].box for name in own}))
        # The thread needs its own process group, because its collectives run in parallel with those of training. The group exists
        # only during the save, because gloo's threads poll a hundred times a second.
        self._saving_group = dist.new_group(backend="gloo", timeout=self._timeout, group_desc=SAVING)
        header = {"format": FORMAT, "step": step, "plan_digest": plan_digest, "values": state.values}
        thread = ThreadPoolExecutor(1, thread_name_prefix="undula-checkpoint")
        self._saving_step = step
        self._is_abandoned = threading.Event()
        self._bytes = state.whole_bytes
        entries = partial(entries_of, state.expected, tied, names)
        written = partial(
            write_share, self._store, _folder(step, self._attempt), dist.get_rank(self._group), share, extent
        )
        write = partial(self._write, step, header, entries, written, self._saving_group, self._is_abandoned, began)
        self._saving = thread.submit(write)
        thread.shutdown(wait=False)

    def _own_share(self, expected: Table, pieces: Mapping[str, Piece]) -> tuple[list[str], Names]:
        """Return the names of those pieces that this rank writes, and the names of all ranks' tensors."""
        own, names = Extent.of(Holding(expected, {name: piece.box for name, piece in pieces.items()}))
        extents: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(extents, own, group=self._group)
        known: list[Any] = [names]
        if any(extent.names != own.names for extent in extents):
            known = [None] * len(extents)
            dist.all_gather_object(known, names, group=self._group)
        by_digest = {extent.names: each for extent, each in zip(extents, known, strict=False)}
        return share_of(dist.get_rank(self._group), extents, by_digest), by_digest

    def _write(
        self,
        step: int,
        header: dict[str, Any],
        entries: Entries,
        write_own: Callable[[], WrittenFile | None],
        group: dist.ProcessGroup,
        is_abandoned: threading.Event,
        began: float,
    ) -> None:
        """Write this rank's share, and commit on rank 0 once all ranks have written theirs. A failure of one rank fails all ranks."""
        rank, folder = dist.get_rank(group), _folder(step, self._attempt)
        written: WrittenFile | Exception | None
        try:
            written = write_own()
        except Exception as error:
            written = error
        if is_abandoned.is_set():
            return
        answers: list[Any] | None = [None] * dist.get_world_size(group) if rank == 0 else None
        answer = written if not isinstance(written, Exception) else str(written)
        dist.gather_object(answer, answers, group=group, group_dst=0)
        outcome: list[UndulaError | None] = [None]
        if answers is not None:
            try:
                if failed := [answer for answer in answers if isinstance(answer, str)]:
                    raise CheckpointError(failed[0])
                self._commit(step, folder, header, entries, [file for file in answers if file is not None], began)
            except SupersededError as error:
                outcome = [error]
            except Exception as error:
                outcome = [CheckpointError(self._explained(str(error)))]
        dist.broadcast_object_list(outcome, group=group, group_src=0)
        if outcome[0] is not None:
            raise outcome[0]

    def _explained(self, problem: str) -> str:
        """Delete what the failed save has written, and return why it failed: for lack of room, or for another problem."""
        with suppress(StorageError):
            self.remove_uncommitted()
            if (free := self._store.free_bytes) < self._bytes:
                return f"it needs {size(self._bytes)}, and {self._store.url} has {size(free)} free"
        return problem

    def _commit(
        self, step: int, folder: str, header: dict[str, Any], entries: Entries, files: list[WrittenFile], began: float
    ) -> None:
        body = {
            **header,
            **entries(files),
            "files": {file.name: {"bytes": file.bytes, "sha256": file.sha256} for file in files},
        }
        require_newest(self._store, self._attempt)
        self._before_commit()
        self._store.write(f"{folder}/{COMMIT}", commit_json(body))
        self.newest = step
        self._after_commit(step, time.monotonic() - began)
        try:
            # A later attempt may resume from a checkpoint that this one would delete now, unless it is claimed from here on: then it
            # sees the new checkpoint.
            require_newest(self._store, self._attempt)
            self._remove_superseded()
        except StorageError as error:  # the next save tries again
            self._not_removed(str(error))

    @property
    def has_finished_here(self) -> bool:
        """Whether this rank has finished a save for which `wait()` was not called yet."""
        return self._saving is not None and self._saving.done()

    @property
    def saving_step(self) -> int | None:
        """Step of the save for which `wait()` was not called yet; None if there is none. It is the same on every rank."""
        return None if self._saving is None else self._saving_step

    def wait(self) -> BaseException | None:
        """Wait for the save in progress, if there is one. All ranks must call this at the same step.

        Returns:
            The error with which the save failed; None if it succeeded.
        """
        if self._saving is None:
            return None
        error = self._saving.exception()
        dist.destroy_process_group(self._saving_group)
        self._saving = self._saving_group = None
        return error

    def abandon(self) -> None:
        """Stop waiting for the save in progress, because the group ends. All ranks must call this at the same step.

        The checkpoint is committed only if all ranks had written their files. Its process group ends with those of the group.
        """
        self._is_abandoned.set()
        self._saving = self._saving_group = None

    def newest_whole(
        self, reads: Callable[[int], None] = lambda num_bytes: None
    ) -> tuple[Commit | None, dict[str, str]]:
        """Find the newest undamaged checkpoint. Each rank checks a share of the files, and all ranks get the same result.

        Damaged checkpoints stay until a newer checkpoint is committed, and do not count as kept checkpoints.

        Args:
            reads: Function that is called with the number of bytes that the ranks are about to read.

        Returns:
            The checkpoint, or None if there is none, and a description of the damage of newer checkpoints, by folder.
        """
        rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        commits, unreadable = find_commits(self._store, self._before) if rank == 0 else ([], {})
        count, damaged = self._from_rank_0((len(commits), unreadable))
        newest = None
        for number in range(count):
            commit: Commit = self._from_rank_0(commits[number] if rank == 0 else None)
            names = sorted(commit.files)[rank::world_size]
            reads(commit.bytes)
            found: list[str | None] = [None] * world_size
            dist.all_gather_object(found, commit.damage(self._store, names), group=self._group)
            problems = [problem for problem in found if problem]
            if not problems:
                newest = commit
                break
            damaged[commit.folder] = problems[0]
        self._damaged = set(damaged)
        return newest, damaged

    def load(self, commit: Commit, targets: Mapping[str, Piece]) -> dict[str, Any]:
        """Fill pieces from a checkpoint, and return the values of its state that are not tensors.

        Raises:
            CheckpointError: The checkpoint lacks a tensor, has it with another shape, or cannot be read.
        """
        read_pieces(self._store, commit, targets)
        return dict(commit.values)

    def begin(self, step: int) -> None:
        """Record that this attempt begins at `step`, and delete uncommitted checkpoints of earlier attempts. Only rank 0 may call this."""
        kept = [
            folder
            for folder in committed_folders(self._store)
            if self._before.includes_checkpoint(folder, attempt_of(folder)) and step_of(folder) <= step
        ]
        begin(self._store, self._attempt, self._before, step, kept)
        self._has_begun = True
        self.newest = max(map(step_of, kept), default=None)
        try:
            self.remove_uncommitted()
        except StorageError as error:  # the next save tries again
            self._not_removed(str(error))

    def remove_uncommitted(self) -> None:
        """Delete uncommitted checkpoints of this attempt and, if it has begun, of earlier ones.

        Before it has begun, an earlier attempt that is still alive could commit a checkpoint whose files are gone. Only rank 0 may call
        this, and only while no save is in progress.
        """
        names = [entry.name for entry in self._store.list(CHECKPOINTS)]
        whole = {name.removesuffix(f"/{COMMIT}") for name in names if name.endswith(f"/{COMMIT}")}
        empty = {f"{CHECKPOINTS}/{folder}" for folder in self._store.folders(CHECKPOINTS)}  # or with a part of a file
        begun = ({name.rpartition("/")[0] for name in names} | empty) - whole
        lowest = 0 if self._has_begun else self._attempt
        self._remove(folder for folder in begun if lowest <= attempt_of(folder) <= self._attempt)

    def _remove(self, folders: Iterable[str]) -> None:
        """Delete checkpoints. Each becomes invisible to readers at once."""
        for folder in folders:
            self._store.delete(f"{folder}/{COMMIT}")  # first, so that readers ignore the remaining files
            self._store.delete(folder)

    def _remove_superseded(self) -> None:
        self.remove_uncommitted()
        lineage = read_lineage(self._store)
        self._remove(
            folder
            for folder in committed_folders(self._store)
            # A later attempt may have begun since the lineage was read.
            if attempt_of(folder) <= self._attempt and not lineage.includes_checkpoint(folder, attempt_of(folder))
        )
        whole = [commit for commit in find_commits(self._store, lineage)[0] if commit.folder not in self._damaged]
        best = best_commit(whole, self._keep_best) if self._keep_best else None
        known = [(commit.attempt, commit.step, commit.folder) for commit in whole]
        self._remove(superseded(known, self._keep, best.folder if best else None))
        self._remove(self._damaged)  # kept until now, when a newer checkpoint exists
        self._damaged = set()

    def _from_rank_0(self, value: Any) -> Any:
        """Return the value that rank 0 passes, on all ranks."""
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]


def _folder(step: int, attempt: int) -> str:
    return f"{CHECKPOINTS}/step-{step:08d}-a{attempt}"


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy in host memory that shares no storage with other tensors, as safetensors requires."""
    copy = tensor.detach().contiguous().cpu()
    return copy.clone() if copy.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() else copy
