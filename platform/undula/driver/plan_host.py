"""Memory of the hosts of a planned job: what its workers and its head take there, and whether machines with known memory have it."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from undula.driver.plan_job import Planned
from undula.driver.plan_table import gib_text
from undula.plan.candidates import Candidate
from undula.plan.gpus import GIB, MACHINE_GIB
from undula.plan.host_memory import HostLoad, HostParts, has_room_for_snapshots, parts_of_head, parts_of_host
from undula.report.text import counted
from undula.state.defaults import FREE_SHARE
from undula.train.dry_run.counting import Setting

LABELS = {
    "processes": "processes",
    "snapshots": "two snapshots",
    "checkpoint": "a checkpoint that is being written",
    "replicas": "a copy on its way to the head",
    "data": "data",
    "activations": "activations",
}
"""Parts of what a host holds while it trains, as a sentence names them."""
SHOWN = 0.05
"""Smallest part in GiB that a sentence names."""


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
        *((counted.state.split_bytes, counted.state.gradient_bytes) if counted.spec.sharding.stage else (0, 0)),
        counted.spec.sharding.copies == "head",
    )


def host_sentences(planned: Planned, choice: Candidate[Setting] | None) -> Iterator[str]:
    """Yield what a configuration takes on its hosts, and which machines do not have it, in sentences.

    Args:
        planned: Configurations of the job.
        choice: The configuration; None for that of the job's YAML with the most workers.
    """
    # The job's own setting has no candidate if its number format was not measured.
    own = [each for each in planned.candidates if each.setting == planned.own] or planned.candidates
    shown, load = choice or max(own, key=lambda each: each.workers, default=None), load_of(planned)
    if shown is None:
        return
    on_host = _workers_of_host(shown)
    parts, head = parts_of_host(load, on_host, shown.workers), parts_of_head(load, on_host == shown.workers)
    sizes = {label: getattr(parts, name) for name, label in LABELS.items()}
    listed = ", ".join(f"{label} {gib_text(size)}" for label, size in sizes.items() if size > SHOWN * GIB)
    host = (
        f"a host with {on_host} of {counted(shown.workers, 'worker')}"
        if shown.workers > 1
        else "the host of the worker"
    )
    copies = f", of which {gib_text(head.replicas)} are copies of the state" if head.replicas > SHOWN * GIB else ""
    yield (
        f"Beside the memory of GPUs, {host} holds about {_taken(parts)}: {listed}. "
        f"The head holds {gib_text(head.total)}{copies}."
    )
    yield from filter(None, (_problem(machine, load, *worst) for machine, worst in _worst(planned, load).items()))


def _workers_of_host(candidate: Candidate[Setting]) -> int:
    """Return the number of workers of a host: as many as it has GPUs, or all of them if it is no known machine."""
    offer, workers = candidate.offer, candidate.workers
    return min(workers, offer.gpu.machines.get(offer.machine, workers))


def host_tree(planned: Planned) -> dict[str, Any]:
    """Return the parts in bytes for each number of workers on one host, and those of the head, as JSON."""
    load, counts = load_of(planned), sorted({each.workers for each in planned.candidates})
    hosts = [{"workers": count, **asdict(parts_of_host(load, count, count))} for count in counts]
    return {"hosts": hosts, "head": asdict(parts_of_head(load, is_one_host=True))}


def _taken(parts: HostParts) -> str:
    text = gib_text(parts.total - parts.change)
    return f"{text} ({gib_text(parts.total)} while workers change)" if parts.change > SHOWN * GIB else text


def _worst(planned: Planned, load: HostLoad) -> dict[str, tuple[int, int]]:
    """Return the numbers of workers on a host and in all with which it takes most, for each machine with known memory."""
    found: dict[str, list[tuple[int, int]]] = {}
    for each in planned.candidates:
        offer = each.offer
        if offer.machine in MACHINE_GIB:
            found.setdefault(offer.machine, []).append((_workers_of_host(each), each.workers))
    return {machine: max(sizes, key=lambda each: parts_of_host(load, *each).total) for machine, sizes in found.items()}


def _problem(machine: str, load: HostLoad, workers: int, world_size: int) -> str | None:
    """Return what a machine does not have room for; None if it has room for everything."""
    memory, name = MACHINE_GIB[machine] * GIB, f"{machine} has {MACHINE_GIB[machine]} GiB"
    # Snapshots are left out if they do not fit.
    least = parts_of_host(replace(load, takes_snapshots=False), workers, world_size).total
    if least > memory:
        subject = f"{workers} workers take" if workers > 1 else "a worker takes"
        return (
            f"{name}, but {subject} up to {gib_text(least)} there without snapshots; choose a machine with more memory."
        )
    parts = parts_of_host(load, workers, world_size)
    if not has_room_for_snapshots(parts, memory, FREE_SHARE):
        return (
            f"{name}, too little for two snapshots of {gib_text(load.state_bytes)}, so the run takes none there and resumes from "
            "checkpoints if all workers are lost."
        )
    return None
