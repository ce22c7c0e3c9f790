"""Events of workers and their groups: where they run, how they change, and what they wait for.

Also here: events of the fleet, which is the mix of nodes that a run requests from the cluster's autoscaler.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, assert_never

from typing_extensions import TypedDict  # pydantic reads typing.TypedDict from Python 3.12 on

from undula.state.events.base import Event, counted, short


@dataclass(frozen=True)
class FleetEvent(Event):
    """The run requests another mix of nodes from the autoscaler."""

    KIND = "fleet"
    spot: int
    """Number of workers on spot nodes."""
    on_demand: int
    """Number of workers on on-demand nodes."""
    work_left_s: float | None = None
    """Seconds that the whole fleet needs for the remaining steps; None before the pace is measured."""
    time_left_s: float | None = None
    """Seconds until the run's deadline; None if it has none."""

    @property
    def message(self) -> str:
        asks = f"The run asks for {fleet_size(self.spot, self.on_demand)}"
        if self.time_left_s is None:
            return f"{asks}."
        work = "an unmeasured amount" if self.work_left_s is None else f"about {self.work_left_s:.0f} s"
        return f"{asks}: {work} of work remains, and {self.time_left_s:.0f} s until the deadline."


@dataclass(frozen=True)
class OverdueEvent(Event):
    """The run's deadline has passed."""

    KIND = "overdue"
    late_s: float
    """Seconds since the deadline."""

    @property
    def message(self) -> str:
        late = f"The deadline passed {self.late_s:.0f} s ago; the run continues on spot nodes only"
        return f"{late}. Raise workers.fleet.deadline to use on-demand nodes as well."


@dataclass(frozen=True)
class ReleaseEvent(Event):
    """The run stops using a node, so that the autoscaler can terminate it."""

    KIND = "release"
    node: str
    spot: int
    """Number of workers on spot nodes that the run needs."""
    on_demand: int
    """Number of workers on on-demand nodes that the run needs."""

    @property
    def message(self) -> str:
        wanted = fleet_size(self.spot, self.on_demand)
        return f"The run stops using node {short(self.node)}, because it now needs {wanted}."


@dataclass(frozen=True)
class RefusalEvent(Event):
    """The cloud refused to start a type of node."""

    KIND = "refusal"
    node_type: str
    """Name of the type in the cluster's configuration."""
    reason: str = ""
    """Explanation of the cloud; empty if there is none."""

    @property
    def message(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"Nodes of type {self.node_type} are not available{reason}; the run asks for other types."


@dataclass(frozen=True)
class IdleEvent(Event):
    """A node has had room for more workers for a while, but the run cannot use that room."""

    KIND = "idle"
    node: str
    free: int
    """Number of workers for which the node has room."""
    idle_s: float
    """Seconds for which it has had that room."""
    most: int
    """Maximum number of workers with which the run trains."""

    @property
    def message(self) -> str:
        room = f"Node {short(self.node)} has had room for {counted(self.free, 'more worker')} for {self.idle_s:.0f} s"
        most = f"but the job takes {self.most} at most (workers.max, workers.grow)"
        return f"{room}, {most}. Use a smaller cluster or raise that limit."


def fleet_size(spot: int, on_demand: int) -> str:
    """Return the size of a fleet in words, such as `2 spot and 1 on-demand workers`."""
    parts = [f"{count} {market}" for count, market in ((spot, "spot"), (on_demand, "on-demand")) if count]
    return f"{' and '.join(parts) or 'no'} worker{'' if spot + on_demand == 1 else 's'}"


def needs(resources: Mapping[str, float]) -> str:
    """Return the Ray resources of a worker as text, such as `1 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount)


class WorkerPlace(TypedDict, total=False):
    """Place where a worker runs. A key whose value is unknown is absent."""

    rank: int
    node: str
    ip: str
    pid: int | None
    machine: str
    """Name of the machine's type in the cloud, such as g6.xlarge."""
    market: str
    region: str
    zone: str
    share: float
    """Share of the node's resources that the worker reserves, from 0 to 1. It is that of the resource of which it takes the most."""


@dataclass(frozen=True)
class GroupEvent(Event):
    """A worker group has begun to train."""

    KIND = "group"
    workers: tuple[WorkerPlace, ...]
    job: str = ""
    """Identifier of one submission of the job."""

    @property
    def message(self) -> str:
        ranks = ", ".join(
            f"rank {worker.get('rank')} is process {worker.get('pid')} on node {short(worker.get('node', '?'))}"
            for worker in self.workers
        )
        return f"A group of {counted(len(self.workers), 'worker')} starts: {ranks}."


@dataclass(frozen=True)
class NodeEvent(Event):
    """A node has room for workers."""

    KIND = "node"
    node: str
    workers: int
    """Number of workers that start there."""
    start_s: float | None = None
    """Seconds that the last worker took to start; None if that is not known."""

    @property
    def message(self) -> str:
        verb, join, it = ("starts", "joins", "it is") if self.workers == 1 else ("start", "join", "they are")
        when = "" if self.start_s is None else f", after about {self.start_s:.0f} s"
        return f"Node {short(self.node)} has room: {counted(self.workers, 'worker')} {verb} there and {join} when {it} ready{when}."


StayReason = Literal["pause", "never", "room"]


@dataclass(frozen=True)
class StayEvent(Event):
    """The group has fewer workers than it may have, and goes on with them for now."""

    KIND = "stay"
    workers: int
    """Number of workers of the group."""
    most: int
    """Maximum number of workers."""
    reason: StayReason
    """`pause`: workers are ready, but the pause in which they join would cost more than they would gain. `never`: workers.grow is never.
    `room`: no node has room for another worker."""
    wait_s: float = 0.0
    """Seconds without a change of the cluster after which the ready workers join, for `pause`."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Ray resources of one worker."""

    @property
    def message(self) -> str:
        text = f"The run trains with {self.workers} of up to {counted(self.most, 'worker')}"
        match self.reason:
            case "pause":
                why = "the pause in which more would join costs more work than they would do until the cluster's next change"
                return f"{text}, because {why}; they join in about {self.wait_s:.0f} s if nothing changes until then (workers.grow: auto)."
            case "never":
                return f"{text}, because workers.grow is never."
            case "room":
                return f"{text}, because no node has room for another one ({needs(self.resources)}); one joins as soon as there is."
            case _:
                assert_never(self.reason)


@dataclass(frozen=True)
class ResizeEvent(Event):
    """The controller changes the worker group: it ends at its next step boundary, and another group continues."""

    KIND = "resize"
    before: int
    """Number of workers in the group that ends."""
    after: int
    """Number of workers in the next group."""
    reason: str

    @property
    def message(self) -> str:
        change = "stays at" if self.before == self.after else f"changes from {self.before} to"
        return f"The group {change} {counted(self.after, 'worker')}: {self.reason}."


@dataclass(frozen=True)
class SaveEvent(Event):
    """The controller asks for a checkpoint, because nodes will be removed and too few workers stay."""

    KIND = "save"
    reason: str
    lead_s: float | None = None
    """Seconds before the nodes' deadline at which the group stops training; None if it stops after this checkpoint."""

    @property
    def message(self) -> str:
        then = (
            "waits for workers"
            if self.lead_s is None
            else f"trains until {self.lead_s:.0f} s before the nodes' deadline"
        )
        return f"The group saves a checkpoint and then {then}: {self.reason}."


CrashCause = Literal["failure", "storage", "hang", "deadlock", "unresponsive", "unusable"]


@dataclass(frozen=True)
class CrashEvent(Event):
    """Workers of the run were lost in an unplanned way."""

    KIND = "crash"
    cause: CrashCause
    """Cause of the loss. `failure`: ranks raised or died. `storage`: the storage failed, for which the run waits. `hang`: a rank made no
    step. `deadlock`: all ranks waited for each other.
    `unresponsive`: a worker did not answer. `unusable`: a worker could not join another group."""
    error: str = ""
    """Failures of all ranks in one line, for `failure` and `storage`."""
    rank: int | None = None
    node: str | None = None
    pid: int | None = None
    limit_s: float | None = None
    """Seconds without a step after which Undula gave up, for `hang` and `deadlock`."""

    @property
    def message(self) -> str:
        process = f"process {self.pid} on node {short(self.node or '?')}"
        match self.cause:
            case "failure":
                return f"Workers failed ({self.error}); the run continues with a new group."
            case "storage":
                return f"The storage failed ({self.error}); the run tries again with new groups for about half an hour."
            case "hang":
                return (
                    f"Rank {self.rank} ({process}) made no step for {self.limit_s or 0:.1f} s; Undula ends its process."
                )
            case "deadlock":
                waited = f"All ranks waited for each other for {self.limit_s or 0:.1f} s"
                return f"{waited}; Undula aborts their collectives, and they form a new group."
            case "unresponsive":
                return f"The worker in {process} does not answer; another worker takes its place."
            case "unusable":
                return f"The worker in {process} cannot join another group; another worker takes its place."
            case _:
                assert_never(self.cause)


@dataclass(frozen=True)
class NoticeEvent(Event):
    """A node on which the run trains will be removed."""

    KIND = "notice"
    node: str
    ranks: tuple[int, ...]
    """Ranks on the node."""
    deadline: float | None = None
    """Time at which the node is removed, in seconds since the epoch; None if unknown."""

    @property
    def message(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        when = "soon" if self.deadline is None else f"in {max(self.deadline - self.time, 0):.0f} s"
        return f"Node {short(self.node)} with {ranks} will be removed {when}."


WaitedFor = Literal["workers", "state", "growth"]


@dataclass(frozen=True)
class WaitingEvent(Event):
    """The run waits for workers."""

    KIND = "waiting"
    ready: int
    """Number of workers that could train now."""
    starting: int = 0
    needed: int = 0
    """Minimum number of workers with which the run trains."""
    waited_for: WaitedFor = "workers"
    """Reason for the wait. `workers`: too few workers are ready. `state`: a node may hold the newest state. `growth`: more workers are
    about to be ready."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Ray resources of one worker."""
    workers: tuple[WorkerPlace, ...] = ()
    """Workers that are ready and are held while the run waits."""
    job: str = ""
    """Identifier of one submission of the job."""
    rivals: tuple[str, ...] = ()
    """Names of other runs on the cluster that wait for workers as well."""

    @property
    def message(self) -> str:
        counts = f"{self.ready} ready, {self.starting} starting, at least {self.needed} needed"
        match self.waited_for:
            case "workers":
                need = needs(self.resources)
                what = f" with {need}" if need else ""
                also = f", as does {' and '.join(self.rivals)}" if self.rivals else ""
                return f"The run waits for {counted(max(self.needed - self.ready, 0), 'more worker')}{what}{also} ({counts})."
            case "state":
                return f"The run waits for a node that may hold its newest state ({counts})."
            case "growth":
                return f"The run waits for workers that are starting ({counts})."
            case _:
                assert_never(self.waited_for)


@dataclass(frozen=True)
class GiveWayEvent(Event):
    """The run gives ready workers back while it waits, so that other runs can have them."""

    KIND = "give_way"
    workers: int
    """Number of workers that it gives back."""
    rivals: tuple[str, ...]
    """Names of other runs on the cluster that wait for workers."""
    pause_s: float
    """Seconds until the run starts workers again, if other runs still wait then."""

    @property
    def message(self) -> str:
        return (
            f"The run gives {counted(self.workers, 'ready worker')} back for {self.pause_s:.0f} s, because it has too few to train and "
            f"{' and '.join(self.rivals)} may need them."
        )


@dataclass(frozen=True)
class RehearsalEvent(Event):
    """The script failed while a worker rehearsed its steps before it joined."""

    KIND = "rehearsal"
    problem: str

    @property
    def message(self) -> str:
        return (
            "The script failed in the rehearsal in which a worker compiles the model before it joins, so the model is compiled while the "
            f"other workers wait: {self.problem.rstrip('.')}."
        )


@dataclass(frozen=True)
class FaultEvent(Event):
    """A test has injected a fault."""

    KIND = "fault"
    fault: str
    """Text of the fault in the schedule."""

    @property
    def message(self) -> str:
        return f"A fault was injected: {self.fault}."
