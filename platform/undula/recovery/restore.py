"""Restores the state with which a worker group starts.

It is the newest complete state that the ranks of the group hold together or that an undamaged checkpoint has, or else that of step 0.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from undula.errors import RunError
from undula.parallel.layout import Layout
from undula.recovery.live_state import LiveState, Targets
from undula.recovery.progress import MEMORY_BYTES_S, STARTING, STORAGE_BYTES_S, Phase
from undula.recovery.snapshot import NEVER, Age, Snapshot
from undula.recovery.worker_state import HeldState
from undula.state.checkpoint import Checkpointer
from undula.state.checkpoint_files import table_of
from undula.state.commit import Commit
from undula.state.model_state import beside_model_and_optimizer
from undula.state.pieces import Box, Holding, Piece, RankState, copy_overlap, is_complete
from undula.state.records import StepRow

BUCKET_BYTES = 32 * 2**20
Offer: TypeAlias = HeldState | Snapshot
Answers: TypeAlias = list[list[tuple[Age, Holding | None, str]]]
"""Age, holding and origin of each state that a rank offers, by rank."""


@dataclass(frozen=True)
class Restored:
    """State with which a group starts."""

    step: int = 0
    """Number of steps that the state includes."""
    attempt: int = 0
    """Number of the attempt that committed the last of these steps."""
    origin: str = ""
    """Place where the state was, as in "resumed from {origin} at step 12"; empty for a fresh start."""
    rows: tuple[StepRow, ...] = ()
    """Rows of the ledger that may not have reached storage."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of the state that are not tensors and belong to neither the model nor the optimizer, by name."""
    is_checkpoint: bool = False
    """Whether the state comes from a checkpoint."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Description of the damage of newer checkpoints, by folder."""


@dataclass(frozen=True)
class Restorer:
    """Restores the newest available state of a run. All ranks restore the same state.

    Args:
        live: Live state of this rank, which is changed in place.
        checkpoints: Checkpoints of the run.
        plan_digest: Digest of the run's plan.
        attempt: Number that follows that of the newest attempt that has begun. Groups that failed to start have numbers, too.
        layout: Layout of the group.
        find: Callback that finds the snapshots that this rank can read; called only if they are needed.
        begin: Callback that receives the step as soon as it is known, for work that can overlap with the transfer of the state.
        enter: Callback that receives the phase, and the seconds by which its limit is longer, before each part of the work.
    """

    live: LiveState
    checkpoints: Checkpointer
    plan_digest: str
    attempt: int
    layout: Layout
    find: Callable[[], Sequence[Snapshot]]
    begin: Callable[[int], None] = lambda step: None
    enter: Callable[[Phase, float], None] = lambda phase, allowed_s: None

    def restore(self, held: HeldState | None) -> Restored:
        """Restore the newest available state. All ranks must call this together.

        Args:
            held: State that the previous group left in this process; None if there is none.

        Raises:
            RunError: The newest checkpoint belongs to another plan.
        """
        offers: list[Offer] = [held] if held and held.plan_digest == self.plan_digest else []
        answers = self._exchange(offers)
        newest = _newest_complete(answers)
        if (
            newest > NEVER and newest[0] >= self.attempt - 1
        ):  # the previous group committed this state, so no newer one exists
            return self._from_ranks(offers, answers, newest)
        offers += self.find()
        answers = self._exchange(offers)
        newest = _newest_complete(answers)
        commit, damaged = self.checkpoints.newest_whole(self._enter_reading)
        if newest > NEVER and (commit is None or newest >= (commit.attempt, commit.step)):
            return self._from_ranks(offers, answers, newest)
        if commit is None:
            self.begin(0)
            return Restored(damaged=damaged)
        return self._from_checkpoint(commit, damaged)

    def _exchange(self, offers: Sequence[Offer]) -> Answers:
        self.enter(STARTING, 0.0)
        answers: Answers = [[] for _ in range(self.layout.world_size)]
        own = [(offer.age, offer.holding, offer.origin) for offer in offers]
        dist.all_gather_object(answers, own, group=self.layout.control)
        return answers

    def _enter_reading(self, num_bytes: int) -> None:
        """Record that this rank reads so many bytes from storage, or waits for other ranks that do."""
        self.enter(STARTING, num_bytes / STORAGE_BYTES_S)

    def _from_checkpoint(self, commit: Commit, damaged: dict[str, str]) -> Restored:
        if commit.plan_digest != self.plan_digest:
            raise RunError(
                f"{self.checkpoints.url}/{commit.folder} belongs to another plan or other data than this job's; "
                "restore the plan and the data, set another name, or start over with --fresh"
            )
        self.begin(commit.step)
        targets = self.live.targets(table_of(commit))
        self._enter_reading(commit.bytes)
        values = self.checkpoints.load(commit, targets.pieces)
        targets.load(values)
        return Restored(
            commit.step, commit.attempt, "the checkpoint", (), beside_model_and_optimizer(values), True, damaged
        )

    def _from_ranks(self, offers: Sequence[Offer], answers: Answers, age: Age) -> Restored:
        self.begin(age[1])
        holdings = [[holding for their_age, holding, _ in of_rank if their_age == age] for of_rank in answers]
        source = next(rank for rank, of_rank in enumerate(holdings) if of_rank)
        mine = [offer for offer in offers if offer.age == age]
        self.enter(STARTING, sum(offer.bytes for offer in mine if isinstance(offer, Snapshot)) / MEMORY_BYTES_S)
        whole = next((offer for offer in mine if offer.holding is None), None)
        held = [whole.load()] if whole else [offer.load() for offer in mine]
        common: list[Any] = [None, None, None]
        if self.layout.rank == source:
            common = [held[0].values, mine[0].rows, held[0].expected]
        dist.broadcast_object_list(common, group=self.layout.control, group_src=source)
        values, rows, expected = common
        targets = self.live.targets(expected)
        if all(None in of_rank for of_rank in holdings):
            targets.copy_whole(held[0])
        else:
            self._share(targets, held, holdings)
        targets.load(values)
        return Restored(age[1], age[0], origin_of(answers, age), rows, beside_model_and_optimizer(values))

    def _share(self, targets: Targets, held: Sequence[RankState], holdings: Sequence[Sequence[Holding | None]]) -> None:
        """Broadcast a state that the ranks hold together, and copy from it the pieces that this rank needs."""
        layout, pieces = self.layout, targets.pieces
        own = {(name, piece.box): piece.tensor for state in reversed(held) for name, piece in state.pieces.items()}
        for source, bucket in _buckets(_sources(pieces, holdings), pieces):
            example = pieces[bucket[0][0]].tensor
            sizes = [torch.Size(box[1]).numel() for _, box in bucket]
            self.enter(STARTING, 0.0)
            flat = torch.empty(sum(sizes), dtype=example.dtype, device=example.device)
            parts = torch.split(flat, sizes)
            if layout.rank == source:
                for (name, box), part in zip(bucket, parts, strict=True):
                    part.view(box[1]).copy_(own[name, box])
            group = layout.control if flat.device.type == "cpu" else layout.everyone
            dist.broadcast(flat.view(torch.uint8), group=group, group_src=source)
            for (name, box), part in zip(bucket, parts, strict=True):
                copy_overlap(box, part.view(box[1]), pieces[name])


def _newest_complete(answers: Answers) -> Age:
    """Return the age of the newest state that the ranks hold completely; NEVER if there is none.

    Surviving ranks may differ by one step, because one of them may have committed a step before the group broke.
    """
    by_age: dict[Age, list[Holding | None]] = {}
    for age, holding, _ in itertools.chain(*answers):
        by_age.setdefault(age, []).append(holding)
    return max((age for age, holdings in by_age.items() if is_complete(holdings)), default=NEVER)


def origin_of(answers: Answers, age: Age) -> str:
    """Return the places of a state that the ranks hold: that of the whole state, or those of the first holder of each piece."""
    offers = [(holding, origin) for their_age, holding, origin in itertools.chain(*answers) if their_age == age]
    whole = next((origin for holding, origin in offers if holding is None), None)
    if whole is not None:
        return whole
    first: dict[tuple[str, Box], str] = {}
    for holding, origin in offers:
        for piece in holding.boxes.items() if holding else ():
            first.setdefault(piece, origin)
    return " and ".join(dict.fromkeys(first.values()))


def _sources(targets: Mapping[str, Piece], holdings: Sequence[Sequence[Holding | None]]) -> list[tuple[int, str, Box]]:
    """Return (source rank, name, box) of each box to broadcast, so that the boxes make up all tensors. All ranks get the same result.

    If a rank holds the whole state, it is the source of all tensors. Otherwise, each box comes from the first rank that holds it.
    """
    for source, of_rank in enumerate(holdings):
        if None in of_rank:
            return [(source, name, ((0,) * len(piece.shape), piece.shape)) for name, piece in sorted(targets.items())]
    sources: dict[tuple[str, Box], int] = {}
    for source, of_rank in enumerate(holdings):
        for holding in of_rank:
            for name, box in (holding.boxes if holding else {}).items():
                if name in targets:
                    sources.setdefault((name, box), source)
    return sorted((source, name, box) for (name, box), source in sources.items())


def _buckets(
    sources: Iterable[tuple[int, str, Box]], targets: Mapping[str, Piece]
) -> list[tuple[int, list[tuple[str, Box]]]]:
    """Group boxes by source rank, dtype and device type into buckets of at most BUCKET_BYTES each. All ranks get the same result.

    A box of more than BUCKET_BYTES has a bucket of its own.
    """
    buckets: list[tuple[int, list[tuple[str, Box]]]] = []
    sizes: dict[tuple[int, torch.dtype, str], int] = {}
    last: dict[tuple[int, torch.dtype, str], list[tuple[str, Box]]] = {}
    for source, name, box in sources:
        tensor = targets[name].tensor
        kind = (source, tensor.dtype, tensor.device.type)
        num_bytes = torch.Size(box[1]).numel() * tensor.itemsize
        if not num_bytes:
            continue
        if kind not in last or sizes[kind] + num_bytes > BUCKET_BYTES:
            last[kind], sizes[kind] = [], 0
            buckets.append((source, last[kind]))
        last[kind].append((name, box))
        sizes[kind] += num_bytes
    return buckets
