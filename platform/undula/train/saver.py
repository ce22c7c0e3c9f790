"""Storage of a run's state on a rank: in snapshots, in checkpoints, with the controller, and in this process for the next group.

Also here: digest of a model's weights that does not depend on how they are sharded.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from undula.errors import RunError, StorageError, SupersededError
from undula.parallel.layout import timeout_of
from undula.plan.tree import UPDATES
from undula.recovery.live_state import LiveState
from undula.recovery.progress import SAVE, SNAPSHOT, STORAGE_BYTES_S
from undula.recovery.rank_snapshots import RankSnapshots, find_offers
from undula.recovery.restore import Restored, Restorer
from undula.recovery.snapshot import UPDATE_SLOTS, find_snapshots, folder_of, packed, parsed
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.recovery.update_log import UpdateLog, can_record
from undula.recovery.worker_state import HeldState
from undula.state.checkpoint import Checkpointer
from undula.state.events import CheckpointEvent, WarningCode, WarningEvent
from undula.state.model_state import MODEL
from undula.state.pieces import Piece, RankState
from undula.state.spec import lack_of_room
from undula.train.attempt import Attempt
from undula.train.script_state import is_settled
from undula.train.setup import RunSetup
from undula.train.work_folder import work_folder

_CHUNK = 2**16
"""Number of elements that are hashed at once, so that intermediate results stay in the processor's cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype in which the bits of an element are read, by the size of the element in bytes."""
# The constants of splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"), as signed integers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_BITS = 0xD1342543DE82EF95 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def additive_digest(pieces: Mapping[str, Piece]) -> int:
    """Return the sum modulo 2^64 of one hash per element.

    The hash of an element depends on the name of its tensor, its place in the whole tensor, and its bits. The digest of a state is
    therefore the sum of the digests of its boxes, each counted once, however the state is divided into boxes. The call waits for the
    device.
    """
    return sum(_piece_digest(name, piece) for name, piece in pieces.items()) % 2**64


def _piece_digest(name: str, piece: Piece) -> int:
    bits = _bits(piece.tensor.detach())
    key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
    places = _places(piece, bits.shape[-1]).flatten()
    bits = bits.flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        hashed = places[chunk] * _GAMMA
        hashed += key
        hashed += bits[chunk].long() * _BITS  # not in place: 8-byte elements are those of the state itself
        total += _mixed(hashed).sum()
    return int(total.item())


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of each element as integers, with shape [..., number of integers per element]."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor.unsqueeze(-1)
    return tensor.contiguous().view(_INTEGERS[tensor.itemsize])


def _places(piece: Piece, width: int) -> Tensor:
    """Return the place in the whole tensor of each integer of `_bits`, with shape [..., width]."""
    device = piece.tensor.device
    shape = (*piece.shape, width)
    places = torch.arange(width, device=device)
    for dimension in reversed(range(len(piece.shape))):
        stride = prod(shape[dimension + 1 :])
        steps = torch.arange(piece.tensor.shape[dimension], device=device) + piece.offsets[dimension]
        places = (steps * stride).view(-1, *[1] * places.dim()) + places
    return places


def _mixed(values: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 in place."""
    for count, factor in ((30, _MIX_1), (27, _MIX_2)):
        values ^= _shifted(values, count)
        values *= factor
    values ^= _shifted(values, 31)
    return values


def _shifted(values: Tensor, count: int) -> Tensor:
    """Return the values after a logical shift to the right; torch's own shift extends the sign."""
    return (values >> count).bitwise_and_(2 ** (64 - count) - 1)


BEST_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses in seconds after which the checkpoint of the best state is written again if the storage has failed."""
LAST_PAUSES_S = (2.0, 4.0, 8.0, 16.0, *[30.0] * 59)
"""Pauses in seconds after which the last checkpoint is written again if the storage has failed. They take half an hour."""


class StateSaver:
    """Stores the live state of a run after a committed step. All ranks call the methods that save, with the same arguments.

    Args:
        setup: Parts of the run that the rank knows before it has a model.
        attempt: Attempt that commits the steps.
        live: Live state of the rank.

    Attributes:
        snapshots: Snapshots of this rank; None before the run begins, or if the job takes none.
        updates: Record of the updates of this rank, if they can be taken again; None if every rank holds the whole state.
        checkpoints: Checkpoints of the run.
    """

    def __init__(self, setup: RunSetup, attempt: Attempt, live: LiveState):
        spec, control = setup.job.checkpoint, setup.layout.control
        self._setup, self._attempt, self._live = setup, attempt, live
        self._worker = setup.worker
        self.snapshots: RankSnapshots | None = None
        self.updates: UpdateLog | None = None
        self.checkpoints = Checkpointer(
            setup.store,
            control,
            setup.attempt,
            spec.keep,
            attempt.flush,
            lambda done, seconds: attempt.report(CheckpointEvent(seconds, step=done)),
            lambda reason: attempt.report(WarningEvent("checkpoints_not_removed", reason)),
            setup.before,
            spec.keep_best,
            timeout_of(control),
        )

    def restore(self, begin: Callable[[int], None]) -> Restored:
        """Restore the newest complete state of the run. All ranks must call this together.

        Args:
            begin: Callback that receives the step as soon as it is known, for work that can overlap with the transfer of the state.
        """
        setup, before, worker = self._setup, self._setup.before, self._worker
        folder = folder_of(setup.job.run_url, setup.job.run_id)

        restorer = Restorer(
            self._live,
            self.checkpoints,
            setup.plan_digest,
            before.newest + 1,
            setup.layout,
            partial(find_offers, folder, setup.plan_digest, setup.replicas, setup.layout, before.includes_state),
            begin,
            worker.enter,
            setup.leavers,
            before.includes_state,
        )
        held = worker.held
        restored = restorer.restore(held if held and before.includes_state(*held.age) else None)
        worker.shares_state = not self._live.is_whole
        if not worker.shares_state:
            self.release()
        return restored

    def release(self) -> None:
        """Free the state of the former group. For a sharded model, this is done at the first commit, when nodes have snapshots."""
        self._worker.held = None

    def begin(self, restored: Restored) -> None:
        """Begin after the committed steps of a restored state."""
        setup, live, every = self._setup, self._live, self._setup.job.checkpoint.snapshot_every_steps
        if setup.layout.is_first:
            self.checkpoints.begin(restored.step)
        records = not live.is_whole and can_record(live.model, live.optimizer)
        own: Path | None = None
        if every != 0:
            folder, most = folder_of(setup.job.run_url, setup.job.run_id), UPDATES if records else math.inf
            writer = SnapshotWriter(folder, setup.plan_digest, setup.attempt, setup.layout.rank, every, most)
            own = writer.own if every is None or every <= len(UPDATE_SLOTS) else None
        if records:
            self.updates = UpdateLog(
                live.model, live.optimizer, setup.plan_digest, setup.attempt, own, every or UPDATES
            )
        if every != 0:
            replicas = setup.replicas if setup.job.sharding.copies == "head" else None
            self.snapshots = RankSnapshots(live, writer, replicas, setup.layout, self._worker, self.updates)

    def first_snapshot(self, start: int) -> None:
        """Begin a snapshot of the state with which the steps start, if ranks have parts of it alone.

        Without it, a rank that is lost before the snapshot of the first step would cost the steps until then.
        """
        if self.snapshots and not self._live.is_whole and start:
            self.snapshots.begin(start, self._attempt.rows, is_sent=False, attempt=self._attempt.committed_by)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self.checkpoints.saving_step is not None

    def snapshot(self, done: int, sends: bool, is_whole_at_once: bool) -> None:
        """Begin a snapshot of the state after `done` steps.

        Args:
            done: Number of committed steps.
            sends: Whether to send a replica of it to the controller.
            is_whole_at_once: Whether to wait until the snapshot is complete, because code of the script follows that may change weights.
        """
        if self.snapshots:
            self.snapshots.begin(done, self._attempt.rows, sends)
            if is_whole_at_once:
                self._worker.enter(SNAPSHOT)
                self.snapshots.wait()

    def save(self, done: int) -> None:
        """Begin to write a checkpoint of the state after `done` steps."""
        self.finish_saving()
        self._enter_save()
        self.checkpoints.save(done, self._setup.plan_digest, self._live.held())
        self._worker.owes_save = False
        if self._setup.layout.is_first and (files := work_folder()):
            files.bring_along(self._setup.store)

    def save_best(self, done: int) -> None:
        """Write the checkpoint of the best state, and wait until it is committed.

        It is tried again if the storage fails, because later states do not have these weights. A failure that lasts, such as a full
        disk, does not stop the training.
        """
        self.save(done)
        for pause_s in BEST_PAUSES_S:
            if self.finish_saving() is None:
                return
            self._enter_save()
            time.sleep(pause_s)  # gives the storage time to recover
            self.save(done)
        self.finish_saving()

    def finish_saving(self, is_last: bool = False) -> BaseException | None:
        """Wait for the checkpoint that is being written, and report its failure, unless the one before has failed in the same way.

        Args:
            is_last: Whether this is the last checkpoint of the run, which is tried again after LAST_PAUSES_S.

        Returns:
            The error of the checkpoint, or None.

        Raises:
            SupersededError: A newer attempt of the run exists.
        """
        saving_step = self.checkpoints.saving_step
        if saving_step is not None:
            self._enter_save()
        error = self.checkpoints.wait()
        if isinstance(error, SupersededError):
            raise error
        if error:
            self._report_failure(_reason(error), is_last)
        elif saving_step is not None:
            self._worker.reported_failure = ""
            if self.snapshots:
                self.snapshots.checkpoint_committed(saving_step)
        return error

    def _report_failure(self, reason: str, is_last: bool) -> None:
        """Report that a checkpoint could not be written, with the newest one that was, and when the run tries again."""
        code: WarningCode = "last_checkpoint_failed" if is_last else "checkpoint_failed"
        failure = re.sub(r"\d[\d.,]*( [kMG]B)?", "", f"{code} {reason}")  # without the folder's name and sizes
        if failure == self._worker.reported_failure:
            return
        self._worker.reported_failure = failure
        newest = self.checkpoints.newest
        known = "there is no other checkpoint" if newest is None else f"the newest checkpoint is that of step {newest}"
        every_steps, minutes = self._setup.job.checkpoint.every_steps, sum(LAST_PAUSES_S) / 60
        when = f"for {minutes:.0f} minutes" if is_last else f"every {every_steps} steps"
        self._attempt.report(
            WarningEvent(code, f"{reason}; {known}; make room or correct this: the run tries again {when}")
        )

    def report_lack_of_room(self) -> None:
        """Report that the checkpoints of the run will not fit into its folder, if that is so now that the first step has made the state."""
        store, state_bytes = self._setup.store, self._live.held().whole_bytes
        with suppress(StorageError):
            if problem := lack_of_room(self._setup.job.checkpoint, store.url, state_bytes, store.free_bytes):
                self._attempt.report(WarningEvent("no_room", problem))

    def abandon(self) -> None:
        """Give up the checkpoint that is being written. The next group begins it again."""
        self.checkpoints.abandon()
        self._worker.owes_save = True
        self._attempt.report(WarningEvent("checkpoint_failed", "a worker had to leave its node before it was complete"))

    def held(self, done: int, copied: Callable[[], None]) -> HeldState:
        """Return the state of this rank after `done` steps in host memory, where the process keeps it.

        Args:
            done: Number of steps that the state includes.
            copied: Function that is called whenever a part of the state was copied.
        """
        attempt, state = self._attempt, self._live.held().on_host(copied)
        pending = self.updates.pending if self.updates else None
        updates = (replace(pending, state=pending.state.on_host(copied)),) if pending else ()
        return HeldState(self._setup.plan_digest, attempt.committed_by, done, state, attempt.rows, updates=updates)

    def copies(self, done: int) -> dict[str, RankState]:
        """Return the copies of the state after `done` steps that this rank has stored, would send or would hand over, by purpose."""
        job, held = self._setup.job, self.held(done, lambda: None)
        replica = parsed(*packed(held.plan_digest, held.age, held.state, held.rows)).load()
        copies = {"a checkpoint or a hand-over": held.state, "a replica": replica}
        if self.snapshots:
            self.snapshots.wait()
            # A snapshot of a state whose validation or `after_step` was to come need not be like the state after these.
            for stored in find_snapshots(folder_of(job.run_url, job.run_id), self._setup.plan_digest):
                if stored.age == held.age and is_settled(stored.meta["values"]):
                    snapshot, own = stored.load(), self.snapshots.stored(held.state)
                    if snapshot.holding == own.holding:  # other ranks may have stored theirs on this node
                        copies["a snapshot"] = snapshot
        return copies

    def weights_digest(self) -> int:
        """Return the digest of the model's weights. If the model is sharded, all ranks must call this, and rank 0 gets the digest."""
        layout, pieces = self._setup.layout, self._live.held().pieces
        weights = {name: piece for name, piece in pieces.items() if name.startswith(MODEL)}
        if self._live.is_whole:
            return additive_digest(weights)
        counted = {name: piece for name, piece in weights.items() if layout.is_first or not piece.is_replicated}
        digests: list[int] = [0] * layout.world_size
        dist.all_gather_object(digests, additive_digest(counted), group=layout.control)
        return sum(digests) % 2**64

    def end(self, error: BaseException | None) -> None:
        """End the run, whose last checkpoint was tried, and delete its snapshots.

        Raises:
            RunError: The checkpoint has failed.
        """
        if error:
            raise RunError(f"the last checkpoint of the run could not be written: {_reason(error)}") from error
        if self.snapshots:
            self.snapshots.delete()

    def close(self) -> None:
        """End the threads that take snapshots, which stay for a later group."""
        snapshots, self.snapshots = self.snapshots, None
        if snapshots:
            snapshots.close()

    def _enter_save(self) -> None:
        """Record that this rank stores or sends its state, or waits for other ranks that do so."""
        self._worker.progress.enter(SAVE, self._live.held().bytes / STORAGE_BYTES_S)


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
