"""What a machine costs an hour: lists of prices by type and market, each with its date, and how one is found in them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from undula.plan.fleet import ON_DEMAND, SPOT

MARKETS = (SPOT, ON_DEMAND)


@dataclass(frozen=True)
class Machine:
    """What a worker ran on, as its node's labels say; None where they do not."""

    type: str | None
    """The cloud's name of it, such as g6.xlarge."""
    market: str | None
    """One of MARKETS."""
    region: str | None = None
    zone: str | None = None

    @classmethod
    def of(cls, worker: Mapping[str, Any]) -> "Machine":
        """From a worker's entry in the data of an event."""
        return cls(worker.get("machine"), worker.get("market"), worker.get("region"), worker.get("zone"))


@dataclass(frozen=True)
class PriceList:
    """Prices from one source, as they were at one time, in US dollars an hour by type of machine."""

    name: str
    date: str
    """The day, month or year of the prices."""
    source: str
    regions: tuple[str, ...]
    """Where they hold; empty: everywhere."""
    on_demand: Mapping[str, float]
    spot: Mapping[str, float]

    def hourly(self, machine: Machine, market: str) -> float | None:
        """The price of such a machine on one of MARKETS, in US dollars; None where the list has none, or holds elsewhere."""
        if self.regions and machine.region and machine.region not in self.regions:
            return None
        prices = {SPOT: self.spot, ON_DEMAND: self.on_demand}.get(market, {})
        return prices.get(machine.type or "")

    @property
    def title(self) -> str:
        where = f" ({', '.join(self.regions)})" if self.regions else ""
        return f"{self.name} of {self.date}{where}"


@dataclass(frozen=True)
class Quote:
    """A price, and who says so."""

    hourly: float
    """US dollars an hour of the whole machine."""
    title: str


@dataclass(frozen=True)
class Prices:
    """All that is known of prices."""

    lists: tuple[PriceList, ...]
    """The first one that has a price is right."""
    seen: Mapping[Machine, float] = field(default_factory=dict)
    """Spot prices that the cloud remembers of the time of a run; they go before those of any list."""
    seen_title: str = ""
    notes: tuple[str, ...] = ()
    """What is to be told of them, in sentences."""

    def quote(self, machine: Machine, market: str) -> Quote | None:
        """The price of such a machine on a market; None where nobody knows one."""
        if market == SPOT and machine in self.seen:
            return Quote(self.seen[machine], self.seen_title)
        found = ((each.hourly(machine, market), each) for each in self.lists)
        return next((Quote(hourly, each.title) for hourly, each in found if hourly is not None), None)
