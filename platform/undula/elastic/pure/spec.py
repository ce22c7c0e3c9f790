"""Sections of a job's spec for its workers and for Horovod."""

from dataclasses import field, replace
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt
from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT
from undula.plan.fleet import FleetSpec

CPU_CYCLE_TIME_MS = 5
"""Milliseconds between two cycles of Horovod's background thread if workers train on CPUs."""
Gpus: TypeAlias = Annotated[float, Ge(0)] | Literal["auto"]


def _as_tuple(value: Any) -> Any:
    """Return a list of YAML, or a set that an old script passes, as a tuple, because job files are checked strictly."""
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    return tuple(value) if isinstance(value, list) else value


@checked_dataclass(frozen=True, config=STRICT)
class WorkersSpec:
    """Number of workers and resources of each worker."""

    min: Annotated[int, Gt(0)] = 1
    """Minimum number of workers; with fewer, the job waits for nodes."""
    max: Annotated[int, Gt(0)] = 1
    """Maximum number of workers; must not be larger than plan.virtual_workers."""
    cpus: Annotated[float, Ge(0)] = 1.0
    """Number of CPUs that Ray reserves for a worker."""
    gpus: Gpus = "auto"
    """Number of GPUs that Ray reserves for a worker. `auto` is 1 if the cluster has a GPU or its autoscaler can start a node with one, and
    otherwise 0. Workers with GPUs exchange gradients over NCCL; workers without see no GPU."""
    resources: dict[str, float] = field(default_factory=dict)
    """Amounts of other Ray resources that Ray reserves for a worker, by name."""
    fleet: FleetSpec = field(default_factory=FleetSpec)
    """Policy for the nodes that the job requests from the cluster's autoscaler, up to `max`."""
    grow: Literal["auto", "always", "never"] = "auto"
    """Policy for adding workers to a group that trains. `auto` adds them if the work that they are expected to do until the cluster's next
    change exceeds the work that is lost in the pause; `always` adds them in any case, and `never` does not add any."""
    hang_limit_s: Annotated[float, Gt(0)] | None = None
    """Seconds without progress after which a worker counts as lost; by default 10 times the longest recent step, and at least 5. The time
    for which it waits for other workers does not count. The limit is 600 seconds, or this value if it is larger, for what can take longer
    than a step: starting, what the script does between two steps, waiting for samples or a snapshot, validating, saving, the optimizer's
    step, and computing with batches of a
    shape that the group has not had before. Large checkpoints and states extend it. Once a worker has counted as hung, the default follows
    the longest step since, so that steps which take long now and then cost a worker once at most."""
    interfaces: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = None
    """Names of network interfaces for what workers exchange. On each node, gloo (GLOO_SOCKET_IFNAME) and Horovod use the first of them
    that the node has, and NCCL all of them (NCCL_SOCKET_IFNAME). By default, unless these environment variables are set, a node uses the
    interface with the address under which Ray knows it, which `ray start --node-ip-address` chooses for Ray itself."""
    check_memory: bool = True
    """Whether a step is counted as `undula plan` does, before a worker starts on a GPU, and the job is refused if the step would not fit
    into the memory of the smallest GPU that a worker can get, by more than the error of the count. The script runs once more up to its
    first step for this, and again before it is refused, as rank 1 of 2 and in a process without GPUs. A job whose workers have no whole
    GPU is not counted."""
    max_failures: Annotated[int, Ge(-1)] = 3
    """Number of failures that the job survives; -1 for any number. Exceptions of the script count over the whole run; lost workers count
    only until the next committed step, or ten times as long as the run comes no further than before. An exception that every attempt would
    raise, such as a KeyError, ends the job at once."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, which is larger than max ({self.max}); lower min or raise max")
        if problem := _problem_of_gpus(self.gpus, self.max):
            raise ValueError(problem)
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU"):
                raise ValueError(f"resources has {name}; set {name.lower()}s instead")
            if amount < 0:
                raise ValueError(f"resources.{name} is {amount:g}; set an amount of at least 0")
        if (self.fleet.on_demand_floor or 0) > self.max:
            raise ValueError(
                f"fleet.on_demand_floor is {self.fleet.on_demand_floor}, which is larger than max ({self.max}); lower it or raise max"
            )

    def on_cluster(self, has_gpus: bool) -> "WorkersSpec":
        """Return the spec for a cluster, with a number in place of `gpus: auto`.

        Args:
            has_gpus: Whether the cluster has GPUs or can get them.
        """
        return replace(self, gpus=float(has_gpus)) if self.gpus == "auto" else self

    @property
    def per_worker(self) -> dict[str, float]:
        """Amount of each resource that Ray reserves for a worker, by Ray's names. `gpus` must be a number."""
        assert self.gpus != "auto", "the spec must be that of a cluster; see on_cluster"
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {}), **self.resources}


def _problem_of_gpus(gpus: Gpus, max_workers: int) -> str | None:
    """Return why workers cannot have this number of GPUs each, or None if they can."""
    if gpus == "auto" or gpus % 1 == 0:
        return None
    if gpus > 1:
        return f"gpus is {gpus:g}, but Ray can only divide a single GPU; set a whole number"
    if max_workers > 1:
        fix = "set gpus to a whole number, or max: 1"
        return f"gpus is {gpus:g}, but NCCL refuses two workers on the same GPU, and max is {max_workers}; {fix}"
    return None


@checked_dataclass(frozen=True, config=STRICT)
class HorovodSpec:
    """Settings of Horovod's rendezvous and gradient exchange.

    Each field sets an environment variable HOROVOD_* of Horovod 0.28.1 (horovod/common/operations.cc, gloo/gloo_context.cc,
    stall_inspector.cc, parameter_manager.cc).
    """

    nics: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = None
    """Names of network interfaces for Horovod only. Each node uses the first of them that it has (HOROVOD_GLOO_IFACE); NCCL gets all of
    them (NCCL_SOCKET_IFNAME). By default, a node uses the interface of workers.interfaces."""
    timeout_s: Annotated[int, Gt(0)] = 30
    """Maximum seconds for which Horovod waits for a process that does not answer, in the rendezvous and in a collective
    (HOROVOD_GLOO_TIMEOUT_SECONDS). A rank that computes does answer, however long it takes. Ranks do not wait for a rank that is known
    to be lost."""
    fusion_threshold_mib: Annotated[float, Ge(0)] | None = None
    """Maximum MiB of sums of gradients that are fused into one message (HOROVOD_FUSION_THRESHOLD); by default 128, or the value that
    autotune finds."""
    cycle_time_ms: Annotated[float, Gt(0)] | None = None
    """Milliseconds between two checks for gradients that are ready on all ranks (HOROVOD_CYCLE_TIME). The default is the value that
    autotune finds; without autotune, it is 1 with GPUs or with fusion_threshold_mib, and otherwise 5, because each check takes time from
    the cores that train. If this and fusion_threshold_mib are both set, each change of the group needs new processes."""
    cache_capacity: Annotated[int, Ge(0)] | None = None
    """Number of tensors whose descriptions the ranks cache (HOROVOD_CACHE_CAPACITY); by default 1024. 0 disables the cache."""
    autotune: bool = False
    """Whether Horovod tunes the three values above while it trains (HOROVOD_AUTOTUNE). Each group starts new processes and tunes the
    values again."""
    autotune_log: str | None = None
    """File on the node of rank 0 in which autotune records the values that it tries (HOROVOD_AUTOTUNE_LOG). The group's start time is added
    to the file name."""
    timeline: str | None = None
    """File on the node of rank 0 for a trace in the format of chrome://tracing (HOROVOD_TIMELINE). The group's start time is added to
    the file name."""
    timeline_mark_cycles: bool = False
    """Whether the timeline shows each check for gradients (HOROVOD_TIMELINE_MARK_CYCLES)."""
    stall_check_s: Annotated[int, Ge(0)] = 60
    """Seconds after which Horovod logs the tensors that some ranks have not submitted (HOROVOD_STALL_CHECK_TIME_SECONDS); 0 disables
    the check."""
    stall_shutdown_s: Annotated[int, Ge(0)] = 0
    """Seconds after which Horovod ends a group in which some ranks have not submitted a tensor (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS); must
    be larger than stall_check_s. The default 0 disables this, because workers.hang_limit_s already ends hung workers."""
    num_nccl_streams: Annotated[int, Gt(0)] = 1
    """Number of CUDA streams that NCCL uses (HOROVOD_NUM_NCCL_STREAMS)."""
    log_level: Literal["info", "warning", "error", "fatal"] = "warning"
    """Lowest level of the messages that Horovod writes to the workers' log files (HOROVOD_LOG_LEVEL). Levels below info are not
    available, because they would reveal the rendezvous secret."""

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
        """Return the environment variables of the workers, except for addresses. `group` is added to the names of files."""
        # A process in which both this and the fusion threshold are fixed cannot join a second group.
        is_left_to_horovod = has_gpus or self.autotune or self.fusion_threshold_mib is not None
        cycle_time_ms = None if is_left_to_horovod else CPU_CYCLE_TIME_MS
        scaled = None if self.fusion_threshold_mib is None else int(self.fusion_threshold_mib * 2**20)
        values: dict[str, Any] = {
            "GLOO_TIMEOUT_SECONDS": self.timeout_s,
            "FUSION_THRESHOLD": scaled,
            "CYCLE_TIME": self.cycle_time_ms or cycle_time_ms,
            "CACHE_CAPACITY": self.cache_capacity,
            "AUTOTUNE": int(self.autotune),
            "AUTOTUNE_LOG": self.autotune_log and _with_group(self.autotune_log, group),
            "TIMELINE": self.timeline and _with_group(self.timeline, group),
            "TIMELINE_MARK_CYCLES": int(self.timeline_mark_cycles),
            "STALL_CHECK_DISABLE": int(self.stall_check_s == 0),
            "STALL_CHECK_TIME_SECONDS": self.stall_check_s or None,
            "STALL_SHUTDOWN_TIME_SECONDS": self.stall_shutdown_s,
            "NUM_NCCL_STREAMS": self.num_nccl_streams,
            "LOG_LEVEL": self.log_level,
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
        }
        return {f"HOROVOD_{name}": str(value) for name, value in values.items() if value is not None}


def _with_group(file: str, group: str) -> str:
    """Return the path of a file with `group` added to its name."""
    path = PurePath(file)
    return str(path.with_name(f"{path.stem}-{group}{path.suffix}"))
