"""Measurement of the rates of a cluster's workers, which `undula plan` then uses in place of those of data sheets."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from undula.cluster.examine import connect
from undula.cluster.probe import Probe
from undula.elastic.network import node_address, use_interface
from undula.elastic.pure.nodes import workers_that_fit
from undula.elastic.ray.environment import variables_of_worker
from undula.elastic.ray.gpus import reserved_device
from undula.errors import ClusterError, one_line
from undula.plan.precision import Compute
from undula.plan.rates import MeasuredRates
from undula.plan.scaling import Link, fit_link
from undula.plan.work import DeviceRates
from undula.report.text import counted
from undula.train.dry_run.reference import measure

SIZES = (0, 2**16, 2**20, 4 * 2**20, 16 * 2**20)
"""Bytes of the messages with which a link is measured."""
TIMES = 7
"""Number of times that a message is timed, of which the median counts."""
LIMIT_S = 300.0
"""Maximum seconds for the rates of a device, or for a link."""


class Gauge:
    """Process on a node that measures with the resources and the environment of a worker."""

    def device(self) -> tuple[str, float]:
        """Return the name and the bytes of memory of the device."""
        device = reserved_device()
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            return properties.name, float(properties.total_memory)
        return f"CPU with {counted(torch.get_num_threads(), 'thread')}", float(psutil.virtual_memory().total)

    def rates(self) -> dict[str, DeviceRates]:
        """Return the rates of the device by number format."""
        device = reserved_device()
        formats: tuple[Compute, ...] = ("fp32", "bf16") if device.type == "cpu" else ("fp32", "fp16", "bf16")
        return {compute: measure(device, compute) for compute in formats}

    def address(self) -> tuple[str, int]:
        """Return an address of this node at which others can meet."""
        return node_address(), Probe().free_port()

    def message_s(self, address: str, port: int, rank: int) -> list[float]:
        """Return the durations of messages of SIZES, as `message_seconds` does."""
        use_interface(None, node_address())
        return message_seconds(reserved_device(), address, port, rank)


def message_seconds(
    device: torch.device, address: str, port: int, rank: int, sizes: Sequence[int] = SIZES
) -> list[float]:
    """Send messages to the other one of two ranks while it sends as much, and return the median duration for each size.

    Args:
        device: Device of the messages.
        address: Address of rank 0 at which the ranks meet.
        port: Port there.
        rank: Rank of this process, 0 or 1.
        sizes: Bytes of the messages.
    """
    timeout = timedelta(seconds=LIMIT_S)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = TCPStore(address, port, 2, is_master=rank == 0, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    try:
        return [median(_exchanged(size, 1 - rank, device) for _ in range(TIMES)) for size in sizes]
    finally:
        dist.destroy_process_group()


def _exchanged(size: int, peer: int, device: torch.device) -> float:
    sent, received = (torch.zeros(max(size, 1), dtype=torch.uint8, device=device) for _ in range(2))
    dist.barrier()
    began = time.perf_counter()
    # Gloo asks for what it receives. The question would wait behind what this rank sends, if it were asked later.
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, sent, peer)]):
        work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def measure_cluster(address: str, cpus: float, log: Callable[[str], None]) -> MeasuredRates:
    """Measure a worker of a cluster, alone and beside as many others as its node has room for, and the link between two workers: on two
    nodes, if the cluster has two that are alike.

    Args:
        address: Address of the head, HOST:PORT; `auto` for the cluster of this machine.
        cpus: Number of CPUs of a worker.
        log: Function that shows which measurement is running.

    Raises:
        ClusterError: The cluster cannot be reached, or a measurement failed.
    """
    _, nodes = connect(address)
    try:
        has_gpus = any(node["Resources"].get("GPU", 0) for node in nodes)
        worker = {"CPU": cpus, **({"GPU": 1.0} if has_gpus else {})}
        able = [node for node in nodes if workers_that_fit(node["Resources"], worker)]
        if not able:
            raise ClusterError("no node of the cluster has room for a worker; start a worker node, and measure again")
        node, alike = able[0], [each for each in able[1:] if _sizes(each) == _sizes(able[0])]
        room = workers_that_fit(node["Resources"], worker)
        first, *others = (_gauge(node, worker) for _ in range(room))
        # The others must not import their libraries while the first one is measured.
        (name, memory), *_ = [_answer(each) for each in [gauge.device.remote() for gauge in (first, *others)]]
        log("measuring a worker ...")
        rates = full = _answer(first.rates.remote())
        if others:
            log(f"measuring {room} workers of a node at once ...")
            full, *_ = [_answer(each) for each in [gauge.rates.remote() for gauge in (first, *others)]]
        log("measuring the link between two workers ...")
        second = _gauge(alike[0], worker) if alike else next(iter(others), None)
        link = _link(first, second) if second else None
        return MeasuredRates(name, memory, cpus, rates, full, room, link)
    finally:
        ray.shutdown()


def _sizes(node: Mapping[str, Any]) -> dict[str, float]:
    """Return what a node has that makes its workers fast: CPUs, GPUs and their kind."""
    has = node["Resources"]
    return {name: some for name, some in has.items() if name in ("CPU", "GPU") or name.startswith("accelerator_type")}


def _gauge(node: Mapping[str, Any], worker: Mapping[str, float]) -> Any:
    """Start a gauge with the resources of a worker on a node."""
    actor: Any = ray.remote(Gauge)
    options = actor.options(
        num_cpus=worker["CPU"],
        num_gpus=worker.get("GPU", 0),
        runtime_env={"env_vars": variables_of_worker(worker)},
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
    )
    return options.remote()


def _link(first: Any, second: Any) -> Link:
    meet = _answer(first.address.remote())
    asked = [gauge.message_s.remote(*meet, rank) for rank, gauge in enumerate((first, second))]
    seconds = [_answer(each) for each in asked]
    return fit_link(SIZES, [max(pair) for pair in zip(*seconds, strict=True)])


def _answer(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=LIMIT_S)
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"a worker could not be measured ({one_line(error)[:200]}); stop the jobs of the cluster, or start a node, and measure again"
        ) from error
