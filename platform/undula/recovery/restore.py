"""Restores the state with which a worker group starts.

It is the newest complete state that the ranks of the group and workers that leave hold together, or that an undamaged checkpoint has, or
else that of step 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from undula.errors import RunError
from undula.parallel.layout import Layout
from undula.recovery.live_state import LiveState, Targets
from undula.recovery.moves import Dtypes, Move, Need, exchange, lacking, mask_of, moves_to, unpack_parts
from undula.recovery.offers import (
    Answer,
    Answers,
    Asked,
    Common,
    Content,
    Described,
    Leavers,
    Offer,
    boxes_of,
    chosen,
    combined,
    described,
    newest_complete,
    origin_of,
    usable,
)
from undula.recovery.progress import MEMORY_BYTES_S, STARTING, STORAGE_BYTES_S, Phase
from undula.recovery.snapshot import NEVER, Age
from undula.recovery.worker_state import HeldState
from undula.state.boxes import Box
from undula.state.checkpoint import Checkpointer
from undula.state.checkpoint_files import table_of
from undula.state.commit import Commit
from undula.state.model_state import beside_model_and_optimizer
from undula.state.pieces import Piece, RankState, Table, copy_overlap, dtype_named
from undula.state.records import StepRow

BUCKET_BYTES = 32 * 2**20


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
        leavers: Workers that are in no group any more; None if there are none.
        is_of_run: Callback that returns whether the state of an attempt after some steps belongs to the run.
        begin: Callback that receives the step as soon as it is known, for work that can overlap with the transfer of the state.
        enter: Callback that receives the phase, and the seconds by which its limit is longer, before each part of the work.
    """

    live: LiveState
    checkpoints: Checkpointer
    plan_digest: str
    attempt: int
    layout: Layout
    find: Callable[[], Sequence[Offer]]
    begin: Callable[[int], None] = lambda step: None
    enter: Callable[[Phase, float], None] = lambda phase, allowed_s: None
    leavers: Leavers | None = None
    is_of_run: Callable[[int, int], bool] = lambda attempt, step: True

    def restore(self, held: HeldState | None) -> Restored:
        """Restore the newest available state. All ranks must call this together.

        Args:
            held: State that the previous group left in this process; None if there is none.

        Raises:
            RunError: The newest checkpoint belongs to another plan.
        """
        offers = [Offer.of(held, held.updates)] if held and held.plan_digest == self.plan_digest else []
        offers = usable(offers, self.live.optimizer)
        asked = self._exchange(offers)
        newest = newest_complete(asked.answers)
        if (
            newest > NEVER and newest[0] >= self.attempt - 1
        ):  # the previous group committed this state, so no newer one exists
            return self._from_memory(offers, asked, newest)
        offers += usable(self.find(), self.live.optimizer)
        asked = self._exchange(offers)
        newest = newest_complete(asked.answers)
        commit, damaged = self.checkpoints.newest_whole(self._enter_reading)
        if newest > NEVER and (commit is None or newest >= (commit.attempt, commit.step)):
            return self._from_memory(offers, asked, newest)
        if commit is None:
            self.begin(0)
            return Restored(damaged=damaged)
        return self._from_checkpoint(commit, damaged)

    def _exchange(self, offers: Sequence[Offer]) -> Asked:
        """Return the answers of all ranks, and then those of the workers that leave, which rank 0 asks."""
        self.enter(STARTING, 0.0)
        layout = self.layout
        ranks: list[Any] = [None] * layout.world_size
        pairs, names = described(answer for offer in offers for answer in offer.answers())
        asked = self._of_leavers() if layout.is_first else {}
        known = {digest: own for each in (names, *(of for _, of in asked.values())) for digest, own in each.items()}
        dist.all_gather_object(
            ranks, (pairs, {name: pairs for name, (pairs, _) in asked.items()}), group=layout.control
        )
        _, of_leavers = ranks[0]
        if self.leavers:
            self.leavers.names = [*of_leavers]
        sources = [*(pairs for pairs, _ in ranks), *of_leavers.values()]
        knowing: dict[bytes, int] = {}
        for source, pairs in enumerate(sources):
            for digest in dict.fromkeys(extent.names for _, extent in pairs if extent):
                knowing.setdefault(digest, source if source < layout.world_size else 0)
        for digest, rank in knowing.items():
            sent: list[Any] = [known.get(digest)]
            dist.broadcast_object_list(sent, group=layout.control, group_src=rank)
            known[digest] = sent[0]
        return combined(sources, known)

    def _of_leavers(self) -> dict[str, Described]:
        """Return the answers of the workers that leave, by name. They may not know that a later attempt began at an earlier step."""
        found = self.leavers.answers(self.plan_digest) if self.leavers else []
        return {
            name: ([pair for pair in pairs if self.is_of_run(*pair[0].age)], names) for name, (pairs, names) in found
        }

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
        targets = self.live.targets(table_of(commit), commit.values)
        self._enter_reading(commit.bytes)
        values = self.checkpoints.load(commit, targets.pieces)
        targets.load(values)
        return Restored(
            commit.step, commit.attempt, "the checkpoint", (), beside_model_and_optimizer(values), True, damaged
        )

    def _from_memory(self, offers: Sequence[Offer], asked: Asked, age: Age) -> Restored:
        """Restore a state that the ranks and the workers that leave hold together."""
        self.begin(age[1])
        answers, size, numbers = asked.answers, self.layout.world_size, chosen(asked.answers, age)
        used = [[of_source[number] for number in of_used] for of_source, of_used in zip(answers, numbers, strict=True)]
        own = [(offer, answer) for offer in offers for answer in offer.answers()]
        mine = [own[number] for number in numbers[self.layout.rank]]
        self.enter(STARTING, sum(offer.bytes() for offer, _ in mine) / MEMORY_BYTES_S)
        states = [offer.load(answer, self.live.optimizer) for offer, answer in mine]
        values, rows, expected = self._common(mine, used)
        targets = self.live.targets(expected, values)
        given = [answer for of_source in used for answer in of_source]
        is_whole = given[0].holding is None
        if is_whole and all(used[:size]):
            targets.copy_whole(states[0])
        elif is_whole and self.live.is_whole:
            holder = next(source for source, of_source in enumerate(used) if of_source)
            if self.layout.rank == holder:
                targets.copy_whole(states[0])
            self._broadcast(targets.distinct, holder, _dtypes(expected))
        else:
            self._gather(targets, states, Asked(used, asked.kinds), expected)
        targets.load(values)
        origin = origin_of(given[:1] if is_whole else given)
        return Restored(age[1], age[0], origin, rows, beside_model_and_optimizer(values))

    def _common(self, mine: Sequence[tuple[Offer, Answer]], used: Answers) -> Common:
        """Return the values, rows and table that the first source with a part of the state knows, on all ranks."""
        layout = self.layout
        source = next(
            number
            for number, of_source in enumerate(used)
            if any(answer.content == Content.STATE for answer in of_source)
        )
        common: list[Any] = [None]
        first = source if source < layout.world_size else 0
        if layout.rank == first and source == first:
            base = next(offer.base for offer, answer in mine if answer.content == Content.STATE)
            state = base.load()
            common = [(state.values, base.rows, state.expected)]
        elif layout.rank == first:
            assert self.leavers is not None
            common = [self.leavers.common(source - layout.world_size)]
        dist.broadcast_object_list(common, group=layout.control, group_src=first)
        found: Common = common[0]
        return found

    def _broadcast(self, wanted: Mapping[str, Piece], holder: int, dtypes: Dtypes) -> None:
        """Copy whole tensors to all ranks, from a source that has them. If it is a rank, its own pieces are filled already."""
        layout, source = self.layout, holder
        if holder >= layout.world_size:
            source = 0
            if layout.rank == source:
                needed = [(holder, (name, piece.box)) for name, piece in wanted.items()]
                self._fetch(moves_to(source, needed, dtypes), wanted, dtypes)
        for bucket in _buckets(wanted):
            self.enter(STARTING, 0.0)
            pieces = [wanted[name].tensor for name in bucket]
            flat = torch.cat([piece.reshape(-1) for piece in pieces]) if layout.rank == source else _flat_like(pieces)
            group = layout.control if flat.device.type == "cpu" else layout.everyone
            dist.broadcast(flat.view(torch.uint8), group=group, group_src=source)
            if layout.rank != source:
                for piece, part in zip(pieces, torch.split(flat, [piece.numel() for piece in pieces]), strict=True):
                    piece.copy_(part.view(piece.shape))

    def _gather(self, targets: Targets, states: Sequence[RankState], used: Asked, expected: Table) -> None:
        """Fill the pieces of this rank: first from what it has itself, and then from the sources that have the rest."""
        layout, pieces, known, dtypes = self.layout, targets.distinct, sorted(expected), _dtypes(expected)
        for state in reversed(states):
            for name, target in pieces.items():
                if held := state.pieces.get(name):
                    copy_overlap(held.box, held.tensor, target)
        for holder, names in sorted(lacking_whole(layout.world_size, pieces, used, expected).items()):
            self._broadcast({name: pieces[name] for name in names}, holder, dtypes)
            pieces = {name: piece for name, piece in pieces.items() if name not in names}
        own = needs_of(layout.rank, pieces, used, expected)
        of_ranks: list[Any] = [None] * layout.world_size
        dist.all_gather_object(of_ranks, own, group=layout.control)
        moves = []
        for rank, needs in enumerate(of_ranks):
            mine = [need for need in needs if layout.rank in (need.source, rank)]
            moves += moves_to(rank, [part for need in mine for part in need.parts(known)], dtypes)
        among = [move for move in moves if move.source < layout.world_size]
        exchange(layout.rank, among, states, pieces, dtypes, layout.control, lambda: self.enter(STARTING, 0.0))
        self._fetch([move for move in moves if move.source >= layout.world_size], pieces, dtypes)

    def _fetch(self, moves: Sequence[Move], pieces: Mapping[str, Piece], dtypes: Dtypes) -> None:
        """Get parts of a state from workers that leave."""
        if moves:
            assert self.leavers is not None
            asked = [(move.source - self.layout.world_size, move.parts) for move in moves]
            for (_, parts), flat in zip(asked, self.leavers.parts(asked), strict=True):
                self.enter(STARTING, 0.0)
                unpack_parts(flat, parts, pieces, dtypes)


def needs_of(rank: int, pieces: Mapping[str, Piece], used: Asked, expected: Table) -> list[Need]:
    """Return what a rank needs of other sources.

    Args:
        rank: Number of the rank.
        pieces: Pieces that it restores.
        used: Answers from which the state is restored, by source.
        expected: All tensors of the state.
    """
    # Where all answers are whole, no tensor has a kind.
    alike: dict[tuple[str, tuple[int, ...], Box], list[str]] = {}
    for name, piece in pieces.items():
        alike.setdefault((used.kinds.first_of.get(name, ""), expected[name].shape, piece.box), []).append(name)
    needs, known = [], sorted(expected)
    for (first, shape, wanted), names in alike.items():
        sources = [boxes_of(answers, first, shape) for answers in used.answers]
        mask = mask_of(set(names), known)
        needs += [Need(source, box, mask) for source, box in lacking(rank, wanted, sources)]
    return needs


def lacking_whole(
    world_size: int, pieces: Mapping[str, Piece], used: Asked, expected: Table
) -> dict[int, dict[str, None]]:
    """Return the tensors that each rank has as a whole and that several ranks lack, by the first source that has them.

    Args:
        world_size: Number of ranks.
        pieces: Pieces that a rank restores. All ranks get the same result.
        used: Answers from which the state is restored, by source.
        expected: All tensors of the state.
    """
    holders: dict[tuple[str, tuple[int, ...]], int | None] = {}
    found: dict[int, dict[str, None]] = {}
    for name, piece in pieces.items():
        if not (piece.is_replicated and piece.is_whole):
            continue
        kind = used.kinds.first_of.get(name, ""), expected[name].shape
        if kind not in holders:
            has = [piece.box in boxes_of(answers, *kind) for answers in used.answers]
            holders[kind] = has.index(True) if has[:world_size].count(False) > 1 and True in has else None
        if (holder := holders[kind]) is not None:
            found.setdefault(holder, {})[name] = None
    return found


def _dtypes(expected: Table) -> dict[str, torch.dtype]:
    return {name: dtype_named(spec.dtype) for name, spec in expected.items()}


def _flat_like(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return pieces[0].new_empty(sum(piece.numel() for piece in pieces))


def _buckets(pieces: Mapping[str, Piece]) -> list[list[str]]:
    """Group tensors by dtype and device type into buckets of at most BUCKET_BYTES each. All ranks get the same result.

    A tensor of more than BUCKET_BYTES has a bucket of its own.
    """
    buckets: list[list[str]] = []
    sizes: dict[tuple[torch.dtype, str], int] = {}
    last: dict[tuple[torch.dtype, str], list[str]] = {}
    for name, piece in sorted(pieces.items()):
        kind = (piece.tensor.dtype, piece.tensor.device.type)
        if not piece.tensor.nbytes:
            continue
        if kind not in last or sizes[kind] + piece.tensor.nbytes > BUCKET_BYTES:
            last[kind], sizes[kind] = [], 0
            buckets.append(last[kind])
        last[kind].append(name)
        sizes[kind] += piece.tensor.nbytes
    return buckets
