"""Where a worker group begins: at the newest state that its ranks have together, else at the newest whole checkpoint, else at step 0."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.errors import RunError
from undula.parallel.engines.torch_engines import is_sharded
from undula.recovery.handover import Kept, process
from undula.recovery.snapshot import NEVER, Age, Snapshot
from undula.state.checkpoint import Checkpointer
from undula.state.commit import Commit
from undula.state.model_state import Table, beside_model_and_optimizer, empty_like_saved, load_state, table_of
from undula.state.pieces import Box, Part, RankState, Sharding, copy_overlap, is_complete, part_of
from undula.state.records import StepRow

BUCKET_BYTES = 32 * 2**20
Offer: TypeAlias = Kept | Snapshot
Told: TypeAlias = list[list[tuple[Age, Sharding | None]]]
"""By rank: what it has, of which age."""


@dataclass(frozen=True)
class Restored:
    """What a group began with."""

    step: int = 0
    """Steps that are in the state."""
    origin: str = ""
    """In words, for "resumed from {origin} of step 12"; empty for a fresh start."""
    rows: tuple[StepRow, ...] = ()
    """Rows of the ledger that may not have reached storage."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What else was in the state, and is no tensor."""
    is_checkpoint: bool = False
    damaged: dict[str, str] = field(default_factory=dict)
    """What is wrong with newer checkpoints, by folder."""


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoints: Checkpointer,
    plan_digest: str,
    kept: Kept | None,
    find: Callable[[], Sequence[Snapshot]],
    begin: Callable[[int], None],
    attempt: int,
    group: dist.ProcessGroup,
    beside: Mapping[str, Tensor] = MappingProxyType({}),
) -> Restored:
    """Bring model and optimizer to the newest state there is, the same on every rank. All ranks call it.

    Args:
        kept: what this process has of the run.
        find: looks for the snapshots that this rank can read; called where they are needed.
        begin: called with the step as soon as it is known, for what can be done while the state is on its way.
        attempt: of this group.
        beside: what else is in the state, and is changed in place: tensors that each rank has whole.

    Raises:
        RunError: the newest checkpoint is of another plan.
    """
    offers: list[Offer] = [kept] if kept and kept.plan_digest == plan_digest else []
    told = _told(offers, group)
    newest = _newest_complete(told)
    if newest > NEVER and newest[0] >= attempt - 1:  # of the last group: nobody has anything newer
        return _from_ranks(model, optimizer, beside, offers, told, newest, begin, group)
    offers += find()
    told = _told(offers, group)
    newest = _newest_complete(told)
    commit, damaged = _newest_checkpoint(checkpoints, group)
    if newest > NEVER and (commit is None or newest >= (commit.attempt, commit.step)):
        return _from_ranks(model, optimizer, beside, offers, told, newest, begin, group)
    if commit is None:
        begin(0)
        return Restored(damaged=damaged)
    if commit.plan_digest != plan_digest:
        raise RunError(
            f"{checkpoints.url}/{commit.folder} is of another plan or other data than this job's: "
            "restore them, give another name, or start over with --fresh"
        )
    begin(commit.step)
    targets = {**empty_like_saved(model, optimizer, table_of(commit)), **beside}
    values = checkpoints.load(commit, targets)
    load_state(model, optimizer, {**targets, **values})
    return Restored(commit.step, "the checkpoint", (), beside_model_and_optimizer(values), True, damaged)


def _told(offers: Sequence[Offer], group: dist.ProcessGroup) -> Told:
    told: Told = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(told, [(offer.age, offer.sharding) for offer in offers], group=group)
    return told


def _newest_complete(told: Told) -> Age:
    """Survivors may stand one step apart, where one had committed a step before the group broke: the newest counts that is whole."""
    by_age: dict[Age, list[Sharding | None]] = {}
    for age, sharding in (each for of_rank in told for each in of_rank):
        by_age.setdefault(age, []).append(sharding)
    return max((age for age, shardings in by_age.items() if is_complete(shardings)), default=NEVER)


def _from_ranks(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    beside: Mapping[str, Tensor],
    offers: Sequence[Offer],
    told: Told,
    age: Age,
    begin: Callable[[int], None],
    group: dist.ProcessGroup,
) -> Restored:
    begin(age[1])
    shardings = [[sharding for each, sharding in of_rank if each == age] for of_rank in told]
    source = next(rank for rank, of_rank in enumerate(shardings) if of_rank)
    mine = [offer for offer in offers if offer.age == age]
    whole = next((offer for offer in mine if offer.sharding is None), None)
    held = [whole.load()] if whole else [offer.load() for offer in mine]
    is_source = dist.get_rank(group) == source
    common: list[Any] = [held[0].values, mine[0].rows, mine[0].origin, _table(held)] if is_source else [None] * 4
    dist.broadcast_object_list(common, src=source, group=group)
    values, rows, origin, table = common
    targets = {**empty_like_saved(model, optimizer, table), **beside}
    if whole and not is_sharded(model):
        for name, tensor in targets.items():
            tensor.copy_(held[0].parts[name].tensor)
    if is_sharded(model) or not all(None in of_rank for of_rank in shardings):
        _share({name: part_of(tensor) for name, tensor in sorted(targets.items())}, held, shardings, group)
    load_state(model, optimizer, {**targets, **values})
    return Restored(age[1], origin, rows, beside_model_and_optimizer(values))


def _table(held: Sequence[RankState]) -> Table:
    """Dtype and global shape of each tensor of which a rank holds something."""
    return {name: (part.tensor.dtype, part.shape) for each in held for name, part in each.parts.items()}


def _share(
    targets: Mapping[str, Part],
    held: Sequence[RankState],
    shardings: Sequence[Sequence[Sharding | None]],
    group: dist.ProcessGroup,
) -> None:
    """Give every rank its parts of a state that the ranks hold together."""
    own = {(name, part.box): part.tensor for each in held for name, part in each.parts.items()}
    for source, pieces in _buckets(_pieces(targets, shardings), targets):
        example = targets[pieces[0][0]].tensor
        sizes = [torch.Size(box[1]).numel() for _, box in pieces]
        process.enter("other")
        flat = torch.empty(sum(sizes), dtype=example.dtype, device=example.device)
        parts = torch.split(flat, sizes)
        if dist.get_rank(group) == source:
            for (name, box), part in zip(pieces, parts, strict=True):
                part.view(box[1]).copy_(own[name, box])
        # As bytes: gloo does not know all dtypes.
        dist.broadcast(flat.view(torch.uint8), src=source, group=group if flat.device.type == "cpu" else None)
        for (name, box), part in zip(pieces, parts, strict=True):
            copy_overlap(box, part.view(box[1]), targets[name])


def _pieces(targets: Mapping[str, Part], shardings: Sequence[Sequence[Sharding | None]]) -> list[tuple[int, str, Box]]:
    """(source, name, box) that make up all tensors, the same on every rank: from the first that has a tensor whole, else from all."""
    for source, of_rank in enumerate(shardings):
        if None in of_rank:
            return [(source, name, ((0,) * len(part.shape), part.shape)) for name, part in targets.items()]
    found: dict[tuple[str, Box], int] = {}
    for source, of_rank in enumerate(shardings):
        for sharding in of_rank:
            for name, (_, box) in (sharding or {}).items():
                found.setdefault((name, box), source)
    return sorted((source, name, box) for (name, box), source in found.items())


def _buckets(
    pieces: Iterable[tuple[int, str, Box]], targets: Mapping[str, Part]
) -> list[tuple[int, list[tuple[str, Box]]]]:
    """Pieces of one source, type and device together, up to BUCKET_BYTES or one piece in each; the same on every rank."""
    buckets: list[tuple[int, list[tuple[str, Box]]]] = []
    sizes: dict[tuple[int, torch.dtype, str], int] = {}
    last: dict[tuple[int, torch.dtype, str], list[tuple[str, Box]]] = {}
    for source, name, box in pieces:
        tensor = targets[name].tensor
        kind = (source, tensor.dtype, tensor.device.type)
        num_bytes = torch.Size(box[1]).numel() * tensor.itemsize
        if kind not in last or sizes[kind] + num_bytes > BUCKET_BYTES:
            last[kind], sizes[kind] = [], 0
            buckets.append((source, last[kind]))
        last[kind].append((name, box))
        sizes[kind] += num_bytes
    return buckets


def _newest_checkpoint(checkpoints: Checkpointer, group: dist.ProcessGroup) -> tuple[Commit | None, dict[str, str]]:
    if dist.get_rank(group) == 0:
        checkpoints.remove_uncommitted()
    return checkpoints.newest_whole()
