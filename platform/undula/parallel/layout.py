"""Layout of a worker group: its cells, the virtual workers of each cell, and the process group that each collective uses."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from undula.plan.plan import Plan
from undula.plan.tree import Node, assign, roots

_groups: MutableMapping[dist.ProcessGroup, tuple[dist.ProcessGroup, ...]] = WeakKeyDictionary()
"""Process groups of a run beside the default process group, by the latter, with which they end."""


@dataclass(frozen=True)
class Layout:
    """Layout of a worker group, from the point of view of one rank.

    A *cell* is the smallest set of ranks that runs a micro-batch. It is a single rank, unless tensor or pipeline parallelism distributes a
    model over several ranks, which no engine does yet. Virtual workers are assigned to cells, so everything that counts samples counts
    cells: losses, sample digests, elastic batches and capacity. Parameters are sharded across the ranks of `shards`.

    No collective uses torch's default process group implicitly. Each collective names one of the groups below.
    """

    rank: int
    world_size: int
    """Number of ranks."""
    local_rank: int
    """Number of this rank among the ranks of its node."""
    device: torch.device
    control: dist.ProcessGroup
    """Process group of all ranks over gloo, for decisions and small sums on the host, which never wait for a GPU."""
    everyone: dist.ProcessGroup
    """Process group of all ranks with the backend of `device`, for broadcasts of the model's state."""
    shards: dist.ProcessGroup
    """Process group with one rank of each cell, for sums of gradients and sharded parameters."""
    script: dist.ProcessGroup
    """Process group of all ranks over gloo, for collectives that the script asks the run for, such as `run.gather()`."""
    interleaves: bool = False
    """Whether cells take the virtual workers in turn, and not in contiguous ranges."""

    @property
    def num_cells(self) -> int:
        return self.world_size

    @property
    def cell(self) -> int:
        """Number of this rank's cell."""
        return self.rank

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes the ledger, and whose values the other ranks take over where all must be equal."""
        return self.rank == 0

    def assignment(self, virtual_workers: int) -> tuple[range, ...]:
        """Return the virtual workers of each cell, given the number of all virtual workers."""
        if self.interleaves:
            return tuple(range(cell, virtual_workers, self.num_cells) for cell in range(self.num_cells))
        return assign(virtual_workers, self.num_cells)

    def roots(self, virtual_workers: int) -> list[tuple[Node, ...]]:
        """Return the roots of each cell, in the tree over all virtual workers."""
        shares = self.assignment(virtual_workers)
        if self.interleaves and self.num_cells > 1:  # no two siblings are on the same cell
            return [tuple((place, place + 1) for place in share) for share in shares]
        return [roots(virtual_workers, share.start, share.stop) for share in shares]

    def virtual_workers(self, virtual_workers: int) -> range:
        """Return the virtual workers of this rank's cell, given the number of all virtual workers."""
        return self.assignment(virtual_workers)[self.cell]

    def rounds(self, plan: Plan, steps: range) -> int:
        """Return the largest number of micro-batches that any cell has in some steps of a plan."""
        return max(len(plan.work(steps, share)) for share in self.assignment(plan.spec.virtual_workers))


def join_layout(rank: int, world_size: int, device: torch.device, local_rank: int = 0) -> Layout:
    """Make the process groups of a layout. All ranks must call this, after `torch.distributed.init_process_group`.

    The default process group is left to the script. If a script begins a collective there on some ranks alone, they wait in it for ever,
    which can be seen and named. In a group of the run it would meet a collective of the run on the other ranks: gloo mixes their data, or
    aborts the process if they differ in size. This holds for what the run communicates for the script as well.

    The groups have the time limit of the default process group, whereas torch would give each the default of its backend. Another training
    in the same default process group gets the same ones, because threads of gloo poll a hundred times a second for each group. A single
    rank, whose collectives meet no others, needs no groups beside the default one.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        device: Device of this rank.
        local_rank: Number of this rank among the ranks of its node.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed.init_process_group must be called first"
    if world_size == 1 and dist.get_backend(world) == "gloo":
        return Layout(rank, world_size, local_rank, device, control=world, everyone=world, shards=world, script=world)
    if world not in _groups:
        timeout = timeout_of(world)
        backends: tuple[str | None, ...] = (
            ("gloo", None) if dist.get_backend(world) == "gloo" else ("gloo", None, "gloo")
        )
        _groups[world] = tuple(dist.new_group(backend=backend, timeout=timeout) for backend in backends)
    control, shards, *others = _groups[world]
    script = others[0] if others else world
    return Layout(rank, world_size, local_rank, device, control, everyone=shards, shards=shards, script=script)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of a group's collectives."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
