"""A run's state in memory: snapshots on this node, copies of them at the controller, what a worker process hands over."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undula.parallel.engines.torch_engines import is_sharded
from undula.recovery.handover import process
from undula.recovery.replica import Mirror
from undula.recovery.snapshot import Snapshot, find_snapshots, is_private
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.state.model_state import live_buffers, live_leaves
from undula.state.pieces import RankState, rank_state
from undula.state.records import Event, StepRow


class LiveState:
    """The tensors of a model and its optimizer that training changes in place, and the values beside them.

    Args:
        state: makes the flat state of both, which takes milliseconds: it is called where more than the tensors' elements has changed.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Callable[[], dict[str, Any]]):
        self._model = model
        self._optimizer = optimizer
        self._state = state
        self._seen: list[Any] = []
        self._held: RankState | None = None
        self.is_sharded = is_sharded(model)

    def held(self) -> RankState:
        """What this rank has of it; the same object for as long as the tensors are the same."""
        leaves = list(live_leaves(self._model, self._optimizer))
        if self._held is None or not _are_same(leaves, self._seen):
            self._held, self._seen = rank_state(self._state()), leaves
        return self._held

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the model's buffers, which the next forward pass changes."""
        known = self.held().parts
        return {name: value.detach().clone() for name, value in live_buffers(self._model).items() if name in known}


class StateMemory:
    """Takes snapshots of a rank's live state, on rank 0's word, so that all ranks have the same steps.

    Where nothing is sharded, the state is the same on all ranks: one of each node writes it, and rank 0 sends copies.

    Args:
        live: what is to be kept.
        writer: of this rank.
        mirror: to the controller; None under a controller of Ray's own.
        rank, local_rank: of this process.
    """

    def __init__(self, live: LiveState, writer: SnapshotWriter, mirror: Mirror | None, rank: int, local_rank: int):
        self._live = live
        self._mirror = mirror if rank == 0 or live.is_sharded else None
        self._writer: SnapshotWriter | None = writer if local_rank == 0 or live.is_sharded else None
        self._is_first = rank == 0

    def wants(self, step_s: float) -> tuple[bool, bool]:
        """Whether to take a snapshot after a step, the last one having taken `step_s`, and to send it; rank 0's word counts."""
        if not self._is_first or self._writer is None:
            return False, False
        takes = self._writer.is_due(step_s)
        return takes, takes and self._mirror is not None and self._mirror.is_due(self._live.is_sharded)

    def begin(self, done: int, rows: Sequence[StepRow], is_sent: bool) -> None:
        """Begin to take a snapshot of `done` steps."""
        if self._writer and not self._writer.problem:
            send = self._mirror.send if self._mirror and is_sent else None
            self._writer.begin(done, self._live.held(), self._live.buffers(), rows, send)

    def wait(self) -> None:
        """Before the tensors change."""
        if self._writer:
            self._writer.wait()

    @property
    def lacks_part(self) -> bool:
        """Whether there is no memory for this rank's part, without which those of the others are of no use."""
        return self._live.is_sharded and self._writer is not None and self._writer.problem is not None

    def news(self, done: int, lacks_part: bool) -> Event | None:
        """What is to be told of the snapshots: what they cost, once, and why there are none any more.

        Args:
            done: steps.
            lacks_part: whether any rank's part is missing, as all were told.
        """
        if self._writer is None:
            return None
        if lacks_part or (self._writer.problem and not self._live.is_sharded):
            problem = self._writer.problem or "the node of another rank has no room for its part"
            self.close()
            return Event("notice", f"no snapshots in memory: {problem}", done)
        if process.has_told_snapshots or not (told := self._writer.words()):
            return None
        process.has_told_snapshots = True
        return Event("snapshot", told, done, {"bytes": self._writer.bytes})

    def forget(self) -> None:
        """The run is over."""
        if self._writer:
            self._writer.forget()
        self._writer = None

    def close(self) -> None:
        """Leave the snapshots for whoever comes."""
        if self._writer:
            self._writer.close()
        self._writer = None


def _are_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether tensors are the same objects, and values that cannot change in place are equal."""
    return len(now) == len(then) and all(
        a is b or (not isinstance(a, Tensor) and type(a) is type(b) and a == b) for a, b in zip(now, then, strict=True)
    )


def find_state(folder: Path, plan_digest: str, mirror: Mirror | None, rank: int, world_size: int) -> list[Snapshot]:
    """The snapshots that a rank can read: its node's, and its share of what the controller has, as all others may be gone."""
    found = find_snapshots(folder, plan_digest) if is_private(folder) else []
    if mirror:
        found += [each for each in mirror.fetch(rank, world_size) if each.plan_digest == plan_digest]
    return found
