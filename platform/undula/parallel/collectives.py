"""Collectives of torch.distributed over the ranks of a process group."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.errors import UsageError
from undula.state.checkpoint import SAVING

AllReduce: TypeAlias = Callable[[Tensor], None]
"""Function that sums a tensor over the ranks of a process group, in place."""


def all_reduce_over(group: dist.ProcessGroup) -> AllReduce:
    """Return a function that sums tensors over a process group with torch.distributed."""
    return partial(_all_reduce, group)


def _all_reduce(group: dist.ProcessGroup, tensor: Tensor) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Return whether a flag is set on any rank of a process group, which must support CPU tensors. All ranks must call this."""
    flags = torch.tensor(float(flag), device="cpu")
    _all_reduce(group, flags)
    return bool(flags)


def broadcast_from_rank_0(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Copy the parameters and buffers of rank 0 to every other rank."""
    if dist.get_world_size(group) > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            own = tensor.detach()
            sent = own.contiguous()
            # Tensors are sent as bytes because gloo supports only some dtypes.
            dist.broadcast(_bytes_of(sent), group=group, group_src=0)
            if sent is not own:
                own.copy_(sent)


def sparse_sum(own: Tensor, group: dist.ProcessGroup, sent_as: torch.dtype | None = None) -> Tensor:
    """Return the sum of sparse tensors over the ranks of a process group, each of which may have other rows.

    The ranks exchange their rows and add them up themselves, because no backend sums sparse tensors of 16-bit floats, and NCCL none at all.

    Args:
        own: Sparse tensor of this rank. Its shape, dtype and number of sparse dimensions are the same on all ranks.
        group: Process group of the ranks.
        sent_as: Dtype in which the values are sent; None for their own dtype.
    """
    own = own.coalesce()
    counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=own.device)
    counts[dist.get_rank(group)] = own._nnz()
    dist.all_reduce(counts, group=group)
    rows = counts.tolist()
    indices = _gathered_rows(own.indices().t(), rows, group)
    values = _gathered_rows(own.values().to(sent_as or own.dtype), rows, group)
    summed = values.to(own.dtype)
    return torch.sparse_coo_tensor(indices.t(), summed, own.shape, device=own.device, check_invariants=False).coalesce()


def _gathered_rows(own: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks in one tensor, given the number of rows of each rank."""
    padded = own.new_zeros(max(rows), *own.shape[1:])
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in rows]
    # Tensors are sent as bytes because gloo supports only some dtypes.
    dist.all_gather([_bytes_of(each) for each in found], _bytes_of(padded), group=group)
    return torch.cat([of_rank[:count] for of_rank, count in zip(found, rows, strict=True)])


def begun_collectives() -> int:
    """Return the number of collectives that this process has begun, beside those of checkpoints. This takes microseconds."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.group_desc != SAVING]
    backends = {group._get_backend(device) for group in groups for device in group._device_types}
    return sum(backend._get_sequence_number_for_group() for backend in backends)  # type: ignore[attr-defined]


def require_begun_collectives(expected: int, work: str, instead: str) -> None:
    """Refuse collectives that a script has begun in a batch, where some ranks may have more batches than others.

    All ranks do this in their first batch with such a collective, for which no rank waits in vain.

    Args:
        expected: Number of collectives that this process has begun if the script has begun none in the batch.
        work: What the batch belongs to, such as "step 3".
        instead: What the script should do, for the message.

    Raises:
        UsageError: The script has begun one.
    """
    if begun_collectives() != expected:
        raise UsageError(
            f"the script has begun a collective of torch.distributed in a batch of {work}, such as dist.all_reduce in the model's "
            "forward pass, but the number of batches differs between workers, and the result would depend on the number of workers; "
            f"{instead}"
        )


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
