"""Exchange of the roots of all ranks, after which each rank has the sum along the tree over all virtual workers.

Each slice of a bucket has a rank as its owner, which gets this slice of all roots, adds them up along the tree, and sends the sum to the
others. Two ranks with one root each send it to each other and both add, which takes one message less. If there are as many roots as ranks,
these are the bytes of a ring all-reduce.
"""

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from undula.parallel.collectives import present_groups
from undula.parallel.layout import Layout
from undula.plan.tree import combined

_begun: MutableMapping[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Number of transfers that this process has begun in each process group."""


@dataclass
class Transfer:
    """Exchange of a bucket."""

    place: int
    """Number of the bucket."""
    own: list[Tensor] = field(default_factory=list)
    """Roots of this rank; the sum is written to the first of them."""
    is_added: bool = False
    works: list[Any] = field(default_factory=list)
    """Operations that are under way."""
    received: Tensor | None = None
    """Memory for what the other ranks send, which is kept for the next step."""


class Exchange(ABC):
    """Exchange of buckets, one after the other. The next one is sent while the former one is still on its way.

    Args:
        layout: Layout of the worker group.
        virtual_workers: Number of virtual workers of the plan.

    Attributes:
        rank: Rank of this process.
        num_ranks: Number of ranks.
        counts: Number of roots of each rank.
    """

    def __init__(self, layout: Layout, virtual_workers: int):
        self._all = (0, virtual_workers)
        self._roots = layout.roots(virtual_workers)
        self.counts = list(map(len, self._roots))
        self.rank, self.num_ranks = layout.cell, layout.num_cells
        self._transfers: dict[int, Transfer] = {}
        self._last: Transfer | None = None

    def begin_step(self) -> None:
        self._last = None

    def send(self, place: int, own: Sequence[Tensor]) -> None:
        """Begin to exchange a bucket. All ranks send the buckets in the same order.

        Args:
            place: Number of the bucket.
            own: Roots of this rank in order, each of shape [numel]. They are overwritten.
        """
        transfer = self._transfers.setdefault(place, Transfer(place))
        transfer.own, transfer.is_added = list(own), False
        self.send_roots(transfer)
        if self._last:
            self._add(self._last)
        self._last = transfer

    def finish(self, place: int) -> None:
        """Wait until the first root of this rank, of those passed to `send`, is the sum over all virtual workers."""
        transfer = self._transfers[place]
        self._add(transfer)
        self.await_sums(transfer)
        transfer.own = []

    def _add(self, transfer: Transfer) -> None:
        """Add up the roots that have arrived, and begin to send the sums."""
        if transfer.is_added:
            return
        transfer.is_added = True
        known = self.await_roots(transfer)
        nodes = (node for of_rank in self._roots for node in of_rank)
        total = combined(self._all, dict(zip(nodes, known, strict=True)), Tensor.add_)
        self.send_sums(transfer, total)

    def slices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the slice of each rank."""
        return torch.split(tensor, len(tensor) // self.num_ranks)

    @abstractmethod
    def send_roots(self, transfer: Transfer) -> None:
        """Begin to send the roots of this rank."""

    @abstractmethod
    def await_roots(self, transfer: Transfer) -> list[Tensor]:
        """Return what this rank adds up of the roots of all ranks, in order."""

    @abstractmethod
    def send_sums(self, transfer: Transfer, total: Tensor) -> None:
        """Begin to send the sum to the ranks that need it."""

    @abstractmethod
    def await_sums(self, transfer: Transfer) -> None:
        """Wait until the sum is complete."""


class TorchExchange(Exchange):
    """Exchange over torch.distributed, with messages between two ranks at a time."""

    def __init__(self, layout: Layout, virtual_workers: int):
        super().__init__(layout, virtual_workers)
        self._group = layout.shards
        self._swaps = self.counts == [1, 1]
        self._others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        # Gloo can sum tensors on GPUs, but it sends those in host memory only from one rank to another.
        self._through_host = layout.device.type != "cpu" and dist.get_backend(self._group) == "gloo"
        self._targets: dict[int, Tensor] = {}

    def send_roots(self, transfer: Transfer) -> None:
        if self._through_host:
            self._targets[transfer.place] = transfer.own[0]
            transfer.own = [root.cpu() for root in transfer.own]
        length = len(transfer.own[0]) // (1 if self._swaps else self.num_ranks)
        if transfer.received is None:
            transfer.received = transfer.own[0].new_empty(sum(self.counts) - self.counts[self.rank], length)
        rows = iter(transfer.received)
        incoming = [(next(rows), rank, number) for rank in self._others for number in range(self.counts[rank])]
        outgoing = [
            (root if self._swaps else self.slices(root)[rank], rank, number)
            for rank in self._others
            for number, root in enumerate(transfer.own)
        ]
        self._begin(transfer, incoming, outgoing)

    def await_roots(self, transfer: Transfer) -> list[Tensor]:
        await_messages(transfer)
        assert transfer.received is not None
        if self._swaps:
            return [*transfer.own, *transfer.received]  # the order of two terms does not matter
        own = [self.slices(root)[self.rank] for root in transfer.own]
        before = sum(self.counts[: self.rank])
        return [*transfer.received[:before], *own, *transfer.received[before:]]

    def send_sums(self, transfer: Transfer, total: Tensor) -> None:
        if self._swaps:
            return  # each rank has added the other's root to its own
        slices = self.slices(transfer.own[0])
        mine = slices[self.rank]
        if total.data_ptr() != mine.data_ptr():
            mine.copy_(total)
        number = max(self.counts)
        incoming = [(slices[rank], rank, number) for rank in self._others]
        self._begin(transfer, incoming, [(mine, rank, number) for rank in self._others])

    def await_sums(self, transfer: Transfer) -> None:
        await_messages(transfer)
        if self._through_host:
            self._targets[transfer.place].copy_(transfer.own[0])

    def _begin(
        self,
        transfer: Transfer,
        incoming: Sequence[tuple[Tensor, int, int]],
        outgoing: Sequence[tuple[Tensor, int, int]],
    ) -> None:
        """Begin to send and receive tensors, each with the other rank and the number of the message among those of the bucket."""
        _begun[self._group] = _begun.get(self._group, 0) + 1
        first = transfer.place * (max(self.counts) + 1)
        messages = [(dist.irecv, *message) for message in incoming] + [(dist.isend, *message) for message in outgoing]
        transfer.works = dist.batch_isend_irecv(
            [
                dist.P2POp(function, _sendable(tensor), group=self._group, group_peer=rank, tag=first + number)
                for function, tensor, rank, number in messages
            ]
        )


def begun_transfers() -> dict[str, int]:
    """Return the number of transfers that this process has begun in each present process group, by a name of its own."""
    return {f"transfers in {group.group_name}": _begun[group] for group in present_groups() if group in _begun}


def await_messages(transfer: Transfer) -> None:
    """Wait until the messages of a transfer that are under way have arrived."""
    for work in transfer.works:
        work.wait()
    transfer.works = []


def _sendable(tensor: Tensor) -> Tensor:
    """Return a view that every backend can send: gloo sends no 16-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 2 else tensor
