"""Which ranks run a model together, which virtual workers they have, and which process group each collective uses."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from undula.plan.plan import Plan, assign


@dataclass(frozen=True)
class Layout:
    """The ranks of a worker group, as one of them sees it.

    The ranks are cut into *cells* of `cell_size` consecutive ranks. A cell is the smallest set of ranks that runs a micro-batch:
    one rank, unless tensor or pipeline parallelism spreads a model over several. Virtual workers belong to cells, so whatever
    counts samples counts cells: losses, sample digests, elastic batches and capacity. Shards of parameters lie across the ranks of
    `shards`, one of each cell.

    No collective uses torch's default group implicitly: each names one of the groups below.
    """

    rank: int
    world_size: int
    """Number of ranks."""
    local_rank: int
    """Number of this rank among those of its node."""
    device: torch.device
    control: dist.ProcessGroup
    """All ranks, over gloo: decisions and small sums on the host, which never wait for a GPU."""
    everyone: dist.ProcessGroup
    """All ranks, with the backend of `device`: broadcasts of the model's state."""
    shards: dist.ProcessGroup
    """One rank of each cell, those with this rank's place in their cells: sums of gradients, shards of parameters."""
    cell_size: int = 1
    """Number of ranks in a cell."""

    def __post_init__(self) -> None:
        if self.world_size % self.cell_size:
            raise ValueError(f"{self.world_size} ranks cannot be cut into cells of {self.cell_size}")

    @property
    def num_cells(self) -> int:
        return self.world_size // self.cell_size

    @property
    def cell(self) -> int:
        """Number of this rank's cell."""
        return self.rank // self.cell_size

    @property
    def leads_cell(self) -> bool:
        """Whether this rank speaks for its cell in sums over samples, so that each sample counts once."""
        return self.rank % self.cell_size == 0

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all ranks: it writes the ledger, and its copy of what all have is the one that counts."""
        return self.rank == 0

    def assignment(self, virtual_workers: int) -> tuple[range, ...]:
        """The virtual workers of each cell."""
        return assign(virtual_workers, self.num_cells)

    def virtual_workers(self, virtual_workers: int) -> range:
        """The virtual workers of this rank's cell, of so many."""
        return self.assignment(virtual_workers)[self.cell]

    def rounds(self, plan: Plan, steps: range) -> int:
        """The largest number of micro-batches that a cell has in some steps of a plan."""
        return plan.rounds(steps, self.num_cells)


def join_layout(
    rank: int,
    world_size: int,
    device: torch.device,
    local_rank: int = 0,
    cell_size: int = 1,
    timeout: timedelta | None = None,
) -> Layout:
    """Make the process groups of a layout. Every rank calls it, after `torch.distributed.init_process_group`.

    Args:
        timeout: limit of a collective on the new groups; torch's default without it.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed.init_process_group comes first"
    control = world if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
    shards = world
    if cell_size > 1:
        for place in range(cell_size):  # every rank takes part in making each group
            group = dist.new_group(list(range(place, world_size, cell_size)), timeout=timeout)
            shards = group if rank % cell_size == place else shards
    assert control is not None
    return Layout(rank, world_size, local_rank, device, control, world, shards, cell_size)
