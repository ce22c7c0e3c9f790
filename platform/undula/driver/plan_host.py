"""Memory of the hosts of a planned job: what its workers and its head take there, and whether machines with known memory have it."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from undula.driver.plan_job import Planned
from undula.driver.plan_table import gib_text
from undula.plan.gpus import GIB, MACHINE_GIB
from undula.plan.host_memory import HostLoad, HostParts, fits_host, has_room_for_snapshots, parts_of_head, parts_of_host
from undula.state.defaults import FREE_SHARE

LABELS = {
    "processes": "processes",
    "snapshots": "two snapshots",
    "checkpoint": "a checkpoint that is being written",
    "replicas": "a copy on its way to the head",
    "data": "data",
    "activations": "activations",
}
"""Parts of what a host holds while it trains, as a sentence names them."""


def load_of(planned: Planned) -> HostLoad:
    """Return what the workers of a job hold on their hosts, with the setting of the job's YAML."""
    counted, own = planned.counted, planned.own
    passes = counted.passes[own]
    return HostLoad(
        counted.state.snapshot_bytes,
        passes.batch_bytes,
        passes.saved_bytes if own.activations.offload else 0,
        counted.data,
        counted.spec.plan.virtual_workers,
        counted.spec.checkpoint.snapshot_every_steps != 0,
    )


def host_sentences(planned: Planned) -> Iterator[str]:
    """Yield what the job takes on its hosts, and which machines do not have it, in sentences."""
    load, most = load_of(planned), max(each.workers for each in planned.candidates)
    alone, head = parts_of_host(load, 1, 1), parts_of_head(load, is_one_host=True)
    parts = {label: getattr(alone, name) for name, label in LABELS.items()}
    listed = ", ".join(f"{label} {gib_text(size)}" for label, size in parts.items() if size)
    text = (
        f"Beside the GiB of the table, a worker takes about {gib_text(alone.total - alone.change)} on its host: {listed}; "
        f"and {gib_text(alone.change)} more while the workers change."
    )
    if most > 1:
        together = parts_of_host(load, most, most)
        text += (
            f" {most} workers on one host take {gib_text(together.total - together.change)}, and {gib_text(together.change)} more "
            "while they change."
        )
    yield f"{text} The head takes {gib_text(head.total)}, of which {gib_text(head.replicas)} are copies of the state."
    yield from filter(None, (_problem(machine, *worst) for machine, worst in _worst(planned, load).items()))


def host_tree(planned: Planned) -> dict[str, Any]:
    """Return the parts in bytes for each number of workers on one host, and those of the head, as JSON."""
    load, counts = load_of(planned), sorted({each.workers for each in planned.candidates})
    hosts = [{"workers": count, **asdict(parts_of_host(load, count, count))} for count in counts]
    return {"hosts": hosts, "head": asdict(parts_of_head(load, is_one_host=True))}


def _worst(planned: Planned, load: HostLoad) -> dict[str, tuple[HostParts, int]]:
    """Return the most that a host takes with any number of workers, and the workers on it, for each machine with known memory."""
    found: dict[str, tuple[HostParts, int]] = {}
    for machine, workers, gpus in sorted(
        {
            (each.offer.machine, each.workers, each.offer.gpu.machines[each.offer.machine])
            for each in planned.candidates
            if each.offer.machine in MACHINE_GIB
        }
    ):
        there = min(workers, gpus)
        parts = parts_of_host(load, there, workers)
        if machine not in found or parts.total > found[machine][0].total:
            found[machine] = parts, there
    return found


def _problem(machine: str, parts: HostParts, workers: int) -> str | None:
    """Return what a machine does not have room for; None if it has room for everything."""
    memory = MACHINE_GIB[machine] * GIB
    name = f"{machine} has {MACHINE_GIB[machine]} GiB"
    if not fits_host(parts, memory):
        needed = gib_text(parts.total - parts.snapshots)
        return f"{name}, but {workers} of its workers take up to {needed} without snapshots; choose a machine with more memory."
    if not has_room_for_snapshots(parts, memory, FREE_SHARE):
        return (
            f"{name}, too little for two snapshots of {gib_text(parts.snapshots / 2)}, so the run takes none there and resumes from "
            "checkpoints if all workers are lost."
        )
    return None
