"""Exchange of jobs with `engine: horovod`. It is imported only for such a job, because nothing else needs Horovod."""

import time
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from undula.parallel.reduce.exchange import Exchange, Transfer

POLL_INTERVAL_S = 0.0002


def all_rows(own: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the rows of all ranks in one tensor, given the number of rows of each rank."""
    every: Tensor = _await(hvd.allgather_async(own.contiguous(), name="undula.rows"))
    return every


def _await(handle: Any) -> Any:
    """Poll an operation until it is complete. Horovod's own wait spins, which takes the core that its thread or another rank needs."""
    while not hvd.poll(handle):
        time.sleep(POLL_INTERVAL_S)
    return hvd.synchronize(handle)


class HorovodExchange(Exchange):
    """Exchange over Horovod, by an all-to-all of slices and an all-gather of their sums.

    Horovod supports neither bfloat16 nor messages between two ranks, so all tensors are sent as integers that have the same bytes.
    """

    def send_roots(self, transfer: Transfer) -> None:
        slices = zip(*map(self.slices, transfer.own), strict=True)
        sent = torch.cat([root for of_rank in slices for root in of_rank])
        sent = sent.view(torch.int64)  # slices have a multiple of 64 bytes, and Horovod counts elements in 32 bits
        splits = torch.full((self.num_ranks,), len(sent) // self.num_ranks, dtype=torch.int32, device="cpu")
        transfer.works = [hvd.alltoall_async(sent, splits, name=f"undula.roots.{transfer.place}")]

    def await_roots(self, transfer: Transfer) -> list[Tensor]:
        (handle,) = transfer.works
        received, _ = _await(handle)
        slices = received.view(transfer.own[0].dtype).view(sum(self.counts), -1)
        return list(slices)

    def send_sums(self, transfer: Transfer, total: Tensor) -> None:
        transfer.works = [hvd.allgather_async(total.view(torch.uint8), name=f"undula.sums.{transfer.place}")]

    def await_sums(self, transfer: Transfer) -> None:
        (handle,) = transfer.works
        transfer.own[0].copy_(_await(handle).view(transfer.own[0].dtype))
