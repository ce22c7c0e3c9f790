"""The part of a job's spec that says how many workers it wants and what each needs."""

from dataclasses import field
from pathlib import PurePath
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.plan.fleet import FleetSpec
from undula.plan.plan import STRICT

CPU_CYCLE_TIME_MS = 5


@checked_dataclass(frozen=True, config=STRICT)
class WorkersSpec:
    """How many workers, and what each needs."""

    min: Annotated[int, Gt(0)] = 1
    """Fewest workers to train with; below, the job waits for nodes."""
    max: Annotated[int, Gt(0)] = 1
    """Most workers to train with; at most plan.virtual_workers."""
    cpus: Annotated[float, Ge(0)] = 1.0
    """CPUs that Ray reserves for a worker."""
    gpus: Annotated[float, Ge(0)] = 0.0
    """GPUs that Ray reserves for a worker; with one, gradients go over NCCL."""
    resources: dict[str, float] = field(default_factory=dict)
    """Further Ray resources that a worker needs, by name."""
    fleet: FleetSpec = field(default_factory=FleetSpec)
    """Which nodes the job asks the cluster's autoscaler for, up to `max`."""
    grow: Literal["auto", "always", "never"] = "auto"
    """When to take in more workers than train: `auto`, where the work that they would do until the cluster's next change, as expected
    from those so far, is more than is lost in the pause, as measured; `always`; or `never`."""
    hang_limit_s: Annotated[float, Gt(0)] | None = None
    """Seconds after which a worker that makes no step is treated as lost; by default 10 times the longest of the last steps, and at
    least 5. While it starts, validates or saves: 600 without a sign, or this, where it is more."""
    max_failures: Annotated[int, Ge(-1)] = 3
    """Failures after which the job gives up; -1 for never: exceptions of the script over the whole run, or workers lost without a step
    between them. An exception that another attempt would not mend, such as a KeyError, ends the job at once."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, more than max ({self.max}): lower min or raise max")
        if (self.fleet.on_demand_floor or 0) > self.max:
            raise ValueError(
                f"fleet.on_demand_floor is {self.fleet.on_demand_floor}, more than max ({self.max}): lower it or raise max"
            )


def _as_tuple(value: Any) -> Any:
    return tuple(sorted(value)) if isinstance(value, set | frozenset) else value


@checked_dataclass(frozen=True, config=STRICT)
class HorovodSpec:
    """How Horovod's ranks find each other and pass on what they have.

    Each field becomes one of Horovod 0.28.1's HOROVOD_* variables: horovod/common/operations.cc, gloo/gloo_context.cc, stall_inspector.cc,
    parameter_manager.cc.
    """

    nics: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = None
    """Network interfaces, the first of them that a node has (HOROVOD_GLOO_IFACE; NCCL_SOCKET_IFNAME has all); by default the one with
    the address under which Ray knows the node."""
    timeout_s: Annotated[int, Gt(0)] = 30
    """Seconds that a rank waits for others, at the rendezvous and in a collective (HOROVOD_GLOO_TIMEOUT_SECONDS); a rank that is known
    to be lost is not waited for."""
    fusion_threshold_mib: Annotated[float, Ge(0)] | None = None
    """Gradients up to so many MiB together go in one message (HOROVOD_FUSION_THRESHOLD); by default 128, or what autotune finds."""
    cycle_time_ms: Annotated[float, Gt(0)] | None = None
    """Milliseconds between two looks for gradients that all ranks have (HOROVOD_CYCLE_TIME); by default 1 with GPUs or a
    fusion_threshold_mib and 5 otherwise, as each look takes time from the cores that train, or what autotune finds. With both given
    a change of the group takes new processes."""
    cache_capacity: Annotated[int, Ge(0)] | None = None
    """Tensors that the ranks need not name to each other again (HOROVOD_CACHE_CAPACITY); by default 1024, and 0 for none."""
    autotune: bool = False
    """Look for the best of the three above while training (HOROVOD_AUTOTUNE); anew in each group, which takes new processes."""
    autotune_log: str | None = None
    """File for what autotune tried, on the node of rank 0 (HOROVOD_AUTOTUNE_LOG); each group's has the time of its start at the end."""
    timeline: str | None = None
    """File for a trace that chrome://tracing shows, on the node of rank 0 (HOROVOD_TIMELINE); each group's has the time of its start at
    the end."""
    timeline_mark_cycles: bool = False
    """Mark the looks for gradients in the timeline (HOROVOD_TIMELINE_MARK_CYCLES)."""
    hierarchical_allreduce: bool = False
    """Sum within each node before the nodes do, over NCCL (HOROVOD_TORUS_ALLREDUCE, as HOROVOD_HIERARCHICAL_ALLREDUCE takes MPI)."""
    stall_check_s: Annotated[int, Ge(0)] = 60
    """Seconds after which Horovod's log names tensors that some ranks have not brought (HOROVOD_STALL_CHECK_TIME_SECONDS); 0 for never."""
    stall_shutdown_s: Annotated[int, Ge(0)] = 0
    """Seconds after which it then ends the group (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS), more than stall_check_s; 0 for never. The job has
    workers.hang_limit_s."""
    num_nccl_streams: Annotated[int, Gt(0)] = 1
    """CUDA streams for NCCL (HOROVOD_NUM_NCCL_STREAMS)."""
    log_level: Literal["info", "warning", "error", "fatal"] = "warning"
    """Of Horovod's own log, which is in the workers' log files (HOROVOD_LOG_LEVEL); below, it would tell the rendezvous' secret."""

    def __post_init__(self) -> None:
        if self.stall_shutdown_s and not 0 < self.stall_check_s < self.stall_shutdown_s:
            raise ValueError(
                f"stall_shutdown_s is {self.stall_shutdown_s} and stall_check_s {self.stall_check_s}: Horovod ends a group only some time "
                "after it has complained, so give a stall_check_s above 0 and below"
            )
        if self.autotune_log and not self.autotune:
            raise ValueError("autotune_log is given and autotune is not: set autotune: true, or leave out both")
        if self.timeline_mark_cycles and not self.timeline:
            raise ValueError("timeline_mark_cycles is given and timeline is not: give its file, or leave out both")

    def variables(self, group: str, has_gpus: bool) -> dict[str, str]:
        """What the workers' environment has of it but for addresses; `group` tells the files of a group from others'."""
        # Of a Horovod in which both are fixed no second group can be made in a process.
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
