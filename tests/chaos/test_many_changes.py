"""Test of a job whose group changes again and again: memory, descriptors, threads and shared memory stay as they are."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import psutil
import pytest
from chaos_kit import Running, long_lived, running

from undula.state.defaults import MEMORY
from undula.state.events import GroupEvent
from undula.state.ledger import last_event, read_ledger
from undula.testing.nodes import Nodes, nodes

SETTLED = 3
"""Number of changes after which nothing may grow."""
STEPS = 8
"""Number of steps of a group before its usage is read, so that snapshots and replicas have been taken."""
SLOPE_LIMIT = {"private_bytes": 2**20, "descriptors": 0.3, "threads": 0.3}
"""Maximum growth per change. The parameters alone take 8 MiB."""
RAYS_SLOPE_LIMIT = {"descriptors": 0.5, "threads": 0.5}
"""The same for Ray's own daemons, whose memory varies by a third from one second to the next."""

OURS = {"driver", "worker", "controller"}
"""Names of the processes that are not Ray's own daemons."""
HOOK = """
import torch

def prepared(module):
    module.large = torch.nn.Parameter(torch.zeros(1024, 2048))
    return module

_forward = language_model.GPT.forward
language_model.GPT.forward = lambda self, text: _forward(self, text) + self.large.sum() * 0
"""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]


@dataclass(frozen=True)
class Usage:
    """What a process uses."""

    private_bytes: int
    """Resident memory without shared pages. Those of Ray's object store would count as soon as the process has read them once."""
    descriptors: int
    threads: int


def usage_of(processes: dict[str, psutil.Process]) -> dict[str, Usage]:
    found = {}
    for name, process in processes.items():
        memory = process.memory_info()
        found[name] = Usage(memory.rss - memory.shared, process.num_fds(), process.num_threads())
    return found


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder. Ray's object store, a file of fixed size without a name, is not among them."""
    found = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # files of a node that has just ended
            found += file.lstat().st_blocks * 512
    return found


def worker_on(spot: Nodes, job: Running, node: str) -> psutil.Process:
    """Return the process that trains on a node."""
    group = last_event(read_ledger(job.store).events, GroupEvent)
    assert group is not None
    (pid,) = (each["pid"] for each in group.workers if each["node"] == node)
    (found,) = (process for process in spot.processes_of(node) if process.pid == pid)
    return found


def changes(spot: Nodes, job: Running, kept: str, waits: bool) -> Iterator[tuple[str, int]]:
    """Change the group again and again: a lost worker, growth, a notice, growth. Yield each change, and the workers after it.

    Args:
        spot: Nodes of the cluster.
        job: The job.
        kept: Node that stays.
        waits: Whether the run waits for the successor of a lost worker, as it does if only its node still has a part of the state.
    """
    while True:
        (other,) = (node for node in spot.nodes if node != kept)
        worker_on(spot, job, other).kill()
        if not waits:
            yield "a worker is killed", 1
        yield "the successor of a killed worker joins", 2
        spot.drain(other, deadline_s=60)
        yield "a node gets a notice", 1
        spot.kill(other)
        spot.add()
        yield "a node is added", 2


def slope(values: Sequence[float], kinds: int) -> float:
    """Return the growth per change: the median of that over as many changes as there are kinds, so that each kind occurs once.

    A value that rises once, such as the memory of the controller when it first holds a second state, does not count.
    """
    return median(later - earlier for earlier, later in zip(values, values[kinds:], strict=False)) / kinds


@pytest.mark.parametrize(("stage", "num_changes"), [(0, 20), (3, 84)])
def test_changes_of_the_group_leave_nothing_behind(text: str, tmp_path: Path, stage: int, num_changes: int) -> None:
    settings = (
        "workers.max=2",
        "schedule.base_lr=3e-4",
        "checkpoint.every_steps=20",
        f"sharding.stage={stage}",
    )
    used: list[dict[str, Usage]] = []
    shared_bytes: list[int] = []
    # Forks would not have the allocator's settings of a worker.
    with nodes() as spot, running(spot, text, tmp_path, 1, *settings, hook=HOOK) as job:
        (kept,) = spot.nodes
        spot.add()
        job.wait_for(lambda: job.sizes().count(2) > STEPS)
        processes = long_lived(spot, psutil.Process(job.driver.process.pid), kept)
        assert processes.keys() > OURS
        for change, size in islice(changes(spot, job, kept, waits=stage > 0), num_changes):
            job.wait_for_group(size, after=job.rows()[-1]["attempt"], steps=STEPS)
            used.append(usage_of(processes))
            shared_bytes.append(bytes_below(MEMORY))
            print(f"change {len(used)}, {change}: {used[-1]}, {shared_bytes[-1]} bytes in {MEMORY}", flush=True)
    kinds = 3 if stage else 4
    assert slope(shared_bytes[SETTLED:], kinds) < SLOPE_LIMIT["private_bytes"]
    for name in processes:
        for key, limit in (SLOPE_LIMIT if name in OURS else RAYS_SLOPE_LIMIT).items():
            grown = slope([getattr(each[name], key) for each in used[SETTLED:]], kinds)
            assert grown < limit, f"{key} of {name} grow by {grown} per change"
