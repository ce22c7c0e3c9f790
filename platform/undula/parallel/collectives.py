"""Collectives of torch.distributed over the ranks of a process group."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from undula.errors import UsageError
from undula.state.checkpoint import SAVING

AllReduce: TypeAlias = Callable[[Tensor], None]
"""Function that sums a tensor over the ranks of a process group, in place."""
AllRows: TypeAlias = Callable[[Tensor, Sequence[int]], Tensor]
"""Function that returns the rows of all ranks in one tensor, given those of this rank and the number of rows of each rank."""


def all_reduce_over(group: dist.ProcessGroup) -> AllReduce:
    """Return a function that sums tensors over a process group with torch.distributed."""
    return partial(_all_reduce, group)


def _all_reduce(group: dist.ProcessGroup, tensor: Tensor) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)


def all_rows(group: dist.ProcessGroup, own: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the rows of all ranks in one tensor, given the number of rows of each rank. All ranks must call this.

    Args:
        group: Process group of the ranks.
        own: Rows of this rank; shape [rows, ...].
        rows: Number of rows of each rank.
    """
    if len(rows) == 1:
        return own
    padded = own.new_zeros(max(rows), *own.shape[1:])
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in rows]
    dist.all_gather([as_bytes(of_rank) for of_rank in gathered], as_bytes(padded), group=group)
    return torch.cat([of_rank[:count] for of_rank, count in zip(gathered, rows, strict=True)])


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Return whether a flag is set on any rank of a process group, which must support CPU tensors. All ranks must call this."""
    flags = torch.tensor(float(flag), device="cpu")
    _all_reduce(group, flags)
    return bool(flags)


def broadcast_from_rank_0(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Copy tensors of rank 0 to every other rank."""
    if dist.get_world_size(group) > 1:
        for tensor in tensors:
            own = tensor.detach()
            sent = own.contiguous()
            dist.broadcast(as_bytes(sent), group=group, group_src=0)
            if sent is not own:
                own.copy_(sent)


def meet(group: dist.ProcessGroup) -> None:
    """Wait until the script of each rank has come to a collective of the run that it begins, as by running a sharded model.

    Gloo aborts a process whose peer is in a collective of another size. In the default process group, which is the script's own, a rank
    that comes there alone waits instead, and can be named.

    Args:
        group: Process group of the collective that follows.
    """
    if dist.get_backend(group) == "gloo":
        dist.barrier()


def present_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this process, beside those of checkpoints."""
    return [group for group in dist.distributed_c10d._world.pg_map if group.group_desc != SAVING]


def begun_collectives() -> int:
    """Return the number of collectives that this process has begun, beside those of checkpoints. This takes microseconds."""
    return sum(begun_by_group().values())


def begun_by_group() -> dict[str, int]:
    """Return the number of collectives that this process has begun in each process group, by name, beside those of checkpoints."""
    backends = {
        group.group_name: {group._get_backend(device) for device in group._device_types} for group in present_groups()
    }
    return {
        name: sum(backend._get_sequence_number_for_group() for backend in of_group)  # type: ignore[attr-defined]
        for name, of_group in backends.items()
    }


class OwnCollectives:
    """Count of the collectives that the run itself begins while a script works on a batch.

    Attributes:
        num_begun: Number of them. It never falls.
    """

    def __init__(self) -> None:
        self.num_begun = 0
        self._is_counting = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the collectives that are begun in the block. Blocks can lie within each other."""
        if self._is_counting:
            yield
            return
        self._is_counting, before = True, begun_collectives()
        try:
            yield
        finally:
            self.num_begun += begun_collectives() - before
            self._is_counting = False


class ScriptCollectives:
    """Refuses collectives that a script begins in a batch, where each rank has other samples, and may have more batches than others.

    All ranks do this in their first batch with such a collective, for which no rank waits in vain.

    Args:
        own: Collectives that the run itself begins in batches.
    """

    def __init__(self, own: Callable[[], int]):
        self._own = own
        self.begin_batch()

    def begin_batch(self) -> None:
        """Begin a batch, from which on the script may begin no collective."""
        self._before = begun_collectives() - self._own()

    def require_none(self, work: str, instead: str) -> None:
        """Refuse collectives that the script has begun in the batch.

        Args:
            work: What the batch belongs to, such as "step 3".
            instead: What the script should do, for the message.

        Raises:
            UsageError: The script has begun one.
        """
        if begun_collectives() - self._own() != self._before:
            raise UsageError(
                f"the script has begun a collective of torch.distributed in a batch of {work}, such as dist.all_reduce in the model's "
                "forward pass, full_tensor(), compute() of a metric of torchmetrics, or a loss with sharded weights, but the number of "
                f"workers decides which batches they have, so that the result would depend on it; {instead}"
            )


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, because gloo can only send some dtypes."""
    return tensor.view(-1).view(torch.uint8)
