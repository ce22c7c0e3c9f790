"""The sections of a job's spec for its workers and for Horovod."""

from dataclasses import field
from pathlib import PurePath
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT
from undula.plan.fleet import FleetSpec

CPU_CYCLE_TIME_MS = 5
"""Milliseconds between two rounds of Horovod's background thread where workers train on CPUs."""


@checked_dataclass(frozen=True, config=STRICT)
class WorkersSpec:
    """Number of workers, and what each of them needs."""

    min: Annotated[int, Gt(0)] = 1
    """Smallest number of workers to train with; with fewer, the job waits for nodes."""
    max: Annotated[int, Gt(0)] = 1
    """Largest number of workers to train with, no more than plan.virtual_workers."""
    cpus: Annotated[float, Ge(0)] = 1.0
    """Number of CPUs that Ray reserves for a worker."""
    gpus: Annotated[float, Ge(0)] = 0.0
    """Number of GPUs that Ray reserves for a worker; workers with GPUs exchange gradients over NCCL."""
    resources: dict[str, float] = field(default_factory=dict)
    """Amounts of other Ray resources that a worker needs, by name."""
    fleet: FleetSpec = field(default_factory=FleetSpec)
    """Policy for the nodes that the job requests from the cluster's autoscaler, up to `max`."""
    grow: Literal["auto", "always", "never"] = "auto"
    """When to add workers to a group that trains: `auto` adds them if the work that they are expected to do until the cluster's next
    change exceeds the work that is lost in the pause; `always`; or `never`."""
    hang_limit_s: Annotated[float, Gt(0)] | None = None
    """Maximum seconds without a step before a worker counts as lost; by default 10 times its longest recent step, and at least 5. While
    a worker starts, validates or saves, the limit is 600 seconds without a sign, or this value if it is larger."""
    max_failures: Annotated[int, Ge(-1)] = 3
    """Number of failures that the job survives; -1 for any number. Exceptions of the script count over the whole run, lost workers only
    until the next committed step. An exception that would come again, such as a KeyError, ends the job at once."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, which is larger than max ({self.max}); lower min or raise max")
        if (self.fleet.on_demand_floor or 0) > self.max:
            raise ValueError(
                f"fleet.on_demand_floor is {self.fleet.on_demand_floor}, which is larger than max ({self.max}); lower it or raise max"
            )


def _as_tuple(value: Any) -> Any:
    return tuple(sorted(value)) if isinstance(value, set | frozenset) else value


@checked_dataclass(frozen=True, config=STRICT)
class HorovodSpec:
    """Settings of Horovod's rendezvous and of its exchange of gradients.

    Each field sets one of the HOROVOD_* variables of Horovod 0.28.1 (horovod/common/operations.cc, gloo/gloo_context.cc,
    stall_inspector.cc, parameter_manager.cc).
    """

    nics: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = None
    """Names of network interfaces, of which each node uses the first that it has (HOROVOD_GLOO_IFACE; NCCL gets all of them in
    NCCL_SOCKET_IFNAME); by default the interface with the address under which Ray knows the node."""
    timeout_s: Annotated[int, Gt(0)] = 30
    """Maximum seconds for which a rank waits for the others, in the rendezvous and in a collective (HOROVOD_GLOO_TIMEOUT_SECONDS);
    nobody waits for a rank that is known to be lost."""
    fusion_threshold_mib: Annotated[float, Ge(0)] | None = None
    """Maximum MiB of gradients that are fused into one message (HOROVOD_FUSION_THRESHOLD); by default 128, or what autotune finds."""
    cycle_time_ms: Annotated[float, Gt(0)] | None = None
    """Milliseconds between two checks for gradients that all ranks have (HOROVOD_CYCLE_TIME); by default 1 with GPUs or with a
    fusion_threshold_mib, 5 otherwise, because each check takes time from the cores that train, or what autotune finds. If this and
    fusion_threshold_mib are both set, a change of the group needs new processes."""
    cache_capacity: Annotated[int, Ge(0)] | None = None
    """Number of tensors whose descriptions the ranks cache (HOROVOD_CACHE_CAPACITY); by default 1024, and 0 for no cache."""
    autotune: bool = False
    """Whether Horovod tunes the three values above while it trains (HOROVOD_AUTOTUNE); each group tunes them anew in new processes."""
    autotune_log: str | None = None
    """File on the node of rank 0 to which autotune writes what it tried (HOROVOD_AUTOTUNE_LOG); the group's start time is added to its
    name."""
    timeline: str | None = None
    """File on the node of rank 0 for a trace in the format of chrome://tracing (HOROVOD_TIMELINE); the group's start time is added to
    its name."""
    timeline_mark_cycles: bool = False
    """Whether the timeline shows each check for gradients (HOROVOD_TIMELINE_MARK_CYCLES)."""
    hierarchical_allreduce: bool = False
    """Whether gradients are summed within each node before they are summed across nodes, over NCCL (HOROVOD_TORUS_ALLREDUCE, because
    HOROVOD_HIERARCHICAL_ALLREDUCE needs MPI)."""
    stall_check_s: Annotated[int, Ge(0)] = 60
    """Seconds after which Horovod logs the tensors that some ranks have not submitted (HOROVOD_STALL_CHECK_TIME_SECONDS); 0 for never."""
    stall_shutdown_s: Annotated[int, Ge(0)] = 0
    """Seconds after which Horovod ends such a group (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS), more than stall_check_s; 0 for never, because
    workers.hang_limit_s already ends hung workers."""
    num_nccl_streams: Annotated[int, Gt(0)] = 1
    """Number of CUDA streams that NCCL uses (HOROVOD_NUM_NCCL_STREAMS)."""
    log_level: Literal["info", "warning", "error", "fatal"] = "warning"
    """Lowest level of the messages that Horovod writes to the workers' log files (HOROVOD_LOG_LEVEL); lower levels would reveal the
    rendezvous secret."""

    def __post_init__(self) -> None:
        if self.stall_shutdown_s and not 0 < self.stall_check_s < self.stall_shutdown_s:
            raise ValueError(
                f"stall_shutdown_s is {self.stall_shutdown_s} and stall_check_s is {self.stall_check_s}, but Horovod ends a group only "
                "after it has logged the stall; set stall_check_s above 0 and below stall_shutdown_s"
            )
        if self.autotune_log and not self.autotune:
            raise ValueError("autotune_log has no effect without autotune; set autotune: true or remove autotune_log")
        if self.timeline_mark_cycles and not self.timeline:
            raise ValueError(
                "timeline_mark_cycles has no effect without timeline; set timeline to a file or remove timeline_mark_cycles"
            )

    def variables(self, group: str, has_gpus: bool) -> dict[str, str]:
        """Environment variables of the workers, without addresses; `group` is added to the names of files."""
        # A process in which both values are fixed cannot join a second group.
        is_left_to_horovod = has_gpus or self.autotune or self.fusion_threshold_mib is not None
        cycle_time_ms = None if is_left_to_horovod else CPU_CYCLE_TIME_MS
        scaled = None if self.fusion_threshold_mib is None else int(self.fusion_threshold_mib * 2**20)
        values: dict[str, Any] = {
            "GLOO_TIMEOUT_SECONDS": self.timeout_s,
            "FUSION_THRESHOLD": scaled,
            "CYCLE_TIME": self.cycle_time_ms or cycle_time_ms,
            "CACHE_CAPACITY": self.cache_capacity,
            "AUTOTUNE": int(self.autotune),
            "AUTOTUNE_LOG": self.autotune_log and _of_group(self.autotune_log, group),
            "TIMELINE": self.timeline and _of_group(self.timeline, group),
            "TIMELINE_MARK_CYCLES": int(self.timeline_mark_cycles),
            "TORUS_ALLREDUCE": int(self.hierarchical_allreduce),
            "STALL_CHECK_DISABLE": int(self.stall_check_s == 0),
            "STALL_CHECK_TIME_SECONDS": self.stall_check_s or None,
            "STALL_SHUTDOWN_TIME_SECONDS": self.stall_shutdown_s,
            "NUM_NCCL_STREAMS": self.num_nccl_streams,
            "LOG_LEVEL": self.log_level,
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
        }
        return {f"HOROVOD_{name}": str(value) for name, value in values.items() if value is not None}


def _of_group(file: str, group: str) -> str:
    path = PurePath(file)
    return str(path.with_name(f"{path.stem}-{group}{path.suffix}"))
