"""Memory that a run takes on its hosts, beside that of the GPUs, from counted quantities. Pure.

The copies of the state are those that `undula.recovery` and the checkpoints make, and their sizes are counted. What a process takes before
the script makes anything is an assumption. What the script itself keeps in host memory is not known.
"""

import math
from dataclasses import asdict, dataclass
from math import ceil

from undula.plan.gpus import GIB
from undula.plan.tree import UPDATES

WORKER_BYTES = 0.7 * GIB
"""Memory of a worker's process: with torch and Ray, but without the libraries of CUDA, which no measurement here has."""
TASK_BYTES = 0.4 * GIB
"""Memory of a process of Ray Data, beside the rows."""
LOADER_BYTES = 0.1 * GIB
"""Memory of a loader process, beside its samples. It shares its libraries with the process that it is forked from."""
NODE_BYTES = 0.5 * GIB
"""Memory of Ray's own processes on a node with workers."""
HEAD_BYTES = 2.0 * GIB
"""Memory of Ray's own processes, the controller and the driver on the head."""
SLOTS = 2
"""Number of snapshots that a host holds. One of them is whole while the other one is written."""
WINDOWS_AHEAD = 2
"""Number of shuffle windows that a worker reads ahead: one is ready, and the next one is being made."""
BATCHES = 3
"""Number of micro-batches of a worker: the one that was read, and two in pinned memory, of which one is being copied to the GPU."""
LOADED_AHEAD = 2
"""Number of micro-batches that a loader process loads ahead."""
LEAVING = 3
"""Number of copies of the state that rank 0 makes to give it to the head, if all workers leave."""
SHARED_MEMORY_SHARE = 0.5
"""Share of the memory of a host that Linux gives to `/dev/shm`, where snapshots are."""


@dataclass(frozen=True)
class DataCount:
    """What a worker needs on its host to read its data, in bytes unless said otherwise."""

    window_bytes: int = 0
    """Decoded rows of one shuffle window of stored data."""
    ahead_bytes: int = 0
    """Most decoded rows that Ray's object store holds for the worker."""
    read_tasks: int = 0
    """Number of processes of Ray Data that read for the worker at once."""
    loaders: int = 0
    """Number of loader processes for a dataset of the script."""
    dataset_bytes: int = 0
    """All pickled and unpickled copies of this dataset, in the worker and in its loader processes."""


NO_DATA = DataCount()


@dataclass(frozen=True)
class HostLoad:
    """What decides how much host memory the workers of a job take, in bytes unless said otherwise."""

    state_bytes: int
    """A copy of the state of the run."""
    batch_bytes: int
    """A micro-batch."""
    offloaded_bytes: int
    """Activations that wait in host memory for the backward pass."""
    data: DataCount
    virtual_workers: int
    """Number of virtual workers of the job."""
    takes_snapshots: bool = True
    split_bytes: int = 0
    """Part of the state that is split over the workers of a sharded model. Each worker holds the rest as a whole."""
    update_bytes: int = 0
    """Gradients that all workers of a sharded model together record of an update."""
    sends_copies: bool = True
    """Whether copies of the state are sent to the head in the background."""

    def worker_bytes(self, world_size: int) -> float:
        """Return what one of some workers holds of the state."""
        return self.state_bytes - self.split_bytes * (1 - 1 / world_size)


@dataclass(frozen=True)
class HostParts:
    """Memory that is taken on a host, in bytes."""

    processes: float = 0.0
    snapshots: float = 0.0
    """The two newest snapshots, which the workers of a host share, and the updates since."""
    checkpoint: float = 0.0
    """Shares of a checkpoint that is being written."""
    replicas: float = 0.0
    """Replicas for the head: one on its way, and on the head itself also those that it keeps."""
    data: float = 0.0
    """Decoded rows, micro-batches and copies of the dataset."""
    activations: float = 0.0
    change: float = 0.0
    """Further copies of the state while the workers change."""

    @property
    def total(self) -> float:
        return math.fsum(asdict(self).values())


def parts_of_host(load: HostLoad, workers: int, world_size: int) -> HostParts:
    """Return the memory that is taken on the host of rank 0, which is the one that takes most.

    Args:
        load: What the workers hold.
        workers: Number of workers on the host.
        world_size: Number of all workers.
    """
    state, data = load.state_bytes, load.data
    windows = ceil(load.virtual_workers / world_size) + WINDOWS_AHEAD
    batches = BATCHES + LOADED_AHEAD * data.loaders
    rows = windows * data.window_bytes + data.ahead_bytes + batches * load.batch_bytes + data.dataset_bytes
    checkpoint, own = state * workers / world_size, load.worker_bytes(world_size)
    # Workers of a sharded model write snapshots and send replicas of their own parts; otherwise one of them does it for all.
    kept = workers * own if load.split_bytes else state
    is_sent = (workers == world_size or load.split_bytes) and load.takes_snapshots and load.sends_copies
    replicas, updates = kept * bool(is_sent), UPDATES * load.update_bytes * workers / world_size
    return HostParts(
        processes=NODE_BYTES + workers * (WORKER_BYTES + data.read_tasks * TASK_BYTES + data.loaders * LOADER_BYTES),
        snapshots=(SLOTS * kept + updates) * load.takes_snapshots,
        checkpoint=checkpoint,
        replicas=replicas,
        data=workers * rows,
        activations=workers * load.offloaded_bytes,
        # After a loss, each worker keeps its state or reads a snapshot. If all workers leave, nothing else is on its way, and rank 0, or
        # each worker of a sharded model, has a copy in host memory, one that is packed, and one in Ray's object store.
        change=max(workers * own, LEAVING * kept - checkpoint - replicas),
    )


def parts_of_head(load: HostLoad, is_one_host: bool) -> HostParts:
    """Return the memory that is taken on the head, if it has no workers.

    Args:
        load: What the workers hold.
        is_one_host: Whether all workers are on one host. Only then, or if the model is sharded, are replicas sent in the background, and
            while one arrives, the head keeps the one before.
    """
    kept = 2 if (is_one_host or load.split_bytes) and load.takes_snapshots and load.sends_copies else 1
    return HostParts(processes=HEAD_BYTES, replicas=(kept + 1) * load.state_bytes)


def has_room_for_snapshots(parts: HostParts, memory_bytes: float, share: float) -> bool:
    """Return whether a host takes snapshots.

    Args:
        parts: What is taken on the host.
        memory_bytes: Memory of the host.
        share: Maximum share of the free memory that snapshots may take.
    """
    free = memory_bytes - parts.processes - parts.data - parts.activations
    return parts.snapshots <= share * min(free, SHARED_MEMORY_SHARE * memory_bytes)
