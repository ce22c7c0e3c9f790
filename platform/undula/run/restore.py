"""Where a worker group begins: at the newest state that one of its ranks has kept, else at the newest whole checkpoint, else at step 0."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.errors import RunError
from undula.run.handover import Kept
from undula.run.modelstate import beside_model_and_optimizer, load_state, model_and_optimizer_state
from undula.state.checkpoint import Checkpointer
from undula.state.commit import Commit
from undula.state.ledger import StepRow
from undula.state.snapshot import Age, Snapshot

NEVER: Age = (-1, -1)
BUCKET_BYTES = 32 * 2**20


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
    snapshot: Snapshot | None,
    begin: Callable[[int], None],
    attempt: int,
    group: dist.ProcessGroup,
) -> Restored:
    """Bring model and optimizer to the newest state there is, the same on every rank. All ranks call it.

    Args:
        kept: what this process has of the run.
        snapshot: what this node has.
        begin: called with the step as soon as it is known, for what can be done while the state is on its way.
        attempt: of this group.

    Raises:
        RunError: the newest checkpoint is of another plan.
    """
    mine = kept if kept and kept.plan_digest == plan_digest else None
    ages = _gathered((mine.attempt, mine.step) if mine else NEVER, group)
    if max(ages) > NEVER and max(ages)[0] >= attempt - 1:  # of the last group: nobody has anything newer
        return _from_ranks(model, optimizer, mine, ages, "the memory of a worker", begin, group)
    stored = _gathered(snapshot.age if snapshot else NEVER, group)
    commit, damaged = _newest_checkpoint(checkpoints, group)
    saved = (commit.attempt, commit.step) if commit else NEVER
    newest = max(*ages, *stored, saved)
    if newest in ages and newest > NEVER:
        return _from_ranks(model, optimizer, mine, ages, "the memory of a worker", begin, group)
    if newest in stored and newest > NEVER:
        if snapshot and snapshot.age == newest:
            mine = Kept(plan_digest, *newest, snapshot.load(), snapshot.rows)
        origin = snapshot.origin if snapshot else "the memory of a node"
        return _from_ranks(model, optimizer, mine, stored, origin, begin, group)
    if commit is None:
        begin(0)
        return Restored(damaged=damaged)
    if commit.plan_digest != plan_digest:
        raise RunError(
            f"{checkpoints.url}/{commit.folder} is of another plan or other data than this job's: "
            "restore them, give another name, or start over with --fresh"
        )
    begin(commit.step)
    state = model_and_optimizer_state(model, optimizer)
    values = checkpoints.load(commit, state)
    load_state(model, optimizer, {**state, **values})
    return Restored(commit.step, "the checkpoint", (), beside_model_and_optimizer(values), True, damaged)


def _from_ranks(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    kept: Kept | None,
    ages: Sequence[Age],
    origin: str,
    begin: Callable[[int], None],
    group: dist.ProcessGroup,
) -> Restored:
    """Survivors may stand one step apart, where one had committed a step before the group broke: the newest state counts."""
    newest = max(ages)
    begin(newest[1])
    source = ages.index(newest)
    rank = dist.get_rank(group)
    if ages[rank] == newest:
        assert kept is not None
        load_state(model, optimizer, kept.state)
    if min(ages) < newest:
        _share(model, optimizer, source, group)
    told: list[Any] = [kept.rows, beside_model_and_optimizer(kept.state)] if rank == source and kept else [None, None]
    dist.broadcast_object_list(told, src=source, group=group)
    rows, values = told
    return Restored(newest[1], origin, rows, values)


def _share(model: nn.Module, optimizer: torch.optim.Optimizer, source: int, group: dist.ProcessGroup) -> None:
    """Give every rank the state of one."""
    state = model_and_optimizer_state(model, optimizer)
    tensors = {name: value.detach() for name, value in sorted(state.items()) if isinstance(value, Tensor)}
    values: list[Any] = [{name: value for name, value in state.items() if name not in tensors}]
    dist.broadcast_object_list(values, src=source, group=group)
    for bucket in _buckets(list(tensors.values())):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.broadcast(flat, src=source, group=group if flat.device.type == "cpu" else None)
        for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))
    load_state(model, optimizer, {**tensors, **values[0]})


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one type and device together, up to BUCKET_BYTES or one tensor in each; the same on every rank."""
    buckets: list[list[Tensor]] = []
    sizes: dict[tuple[torch.dtype, str], int] = {}
    last: dict[tuple[torch.dtype, str], list[Tensor]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device.type)
        if kind not in last or sizes[kind] + tensor.nbytes > BUCKET_BYTES:
            last[kind], sizes[kind] = [], 0
            buckets.append(last[kind])
        last[kind].append(tensor)
        sizes[kind] += tensor.nbytes
    return buckets


def _newest_checkpoint(checkpoints: Checkpointer, group: dist.ProcessGroup) -> tuple[Commit | None, dict[str, str]]:
    is_first = dist.get_rank(group) == 0
    if is_first:
        checkpoints.remove_uncommitted()
    commit, damaged = checkpoints.newest_whole()
    if is_first:
        checkpoints.remove(damaged)  # or they would count among those to keep
    return commit, damaged


def _gathered(value: Age, group: dist.ProcessGroup) -> list[Age]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
