"""Events of the fleet, which is the mix of nodes that a run requests from the cluster's autoscaler."""

from dataclasses import dataclass

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
