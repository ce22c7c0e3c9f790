"""Hourly prices of machines: price lists by machine type and market, each with its date, and the lookup of a price. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from undula.plan.fleet import ON_DEMAND, SPOT

MARKETS = (SPOT, ON_DEMAND)


@dataclass(frozen=True)
class Machine:
    """Machine that a worker ran on, according to its node's labels. A value is None if the node lacks the label."""

    type: str | None
    """Cloud's name of the machine type, such as g6.xlarge."""
    market: str | None
    """Market that the machine was bought on, one of MARKETS."""
    region: str | None = None
    zone: str | None = None

    @classmethod
    def of(cls, worker: Mapping[str, Any]) -> "Machine":
        """Return the machine of a worker, given the worker's entry in an event's data."""
        return cls(worker.get("machine"), worker.get("market"), worker.get("region"), worker.get("zone"))


@dataclass(frozen=True)
class PriceList:
    """Prices from one source at one date."""

    name: str
    date: str
    """Day, month or year of the prices."""
    source: str
    """Origin of the prices, such as a URL."""
    regions: tuple[str, ...]
    """Regions in which the prices apply; empty if they apply everywhere."""
    on_demand: Mapping[str, float]
    """On-demand price in US dollars per hour, by machine type."""
    spot: Mapping[str, float]
    """Spot price in US dollars per hour, by machine type."""

    def hourly(self, machine: Machine, market: str) -> float | None:
        """Return the machine's price on one of MARKETS in US dollars per hour.

        The result is None if the list does not have the machine type or does not apply in its region.
        """
        if self.regions and machine.region and machine.region not in self.regions:
            return None
        prices = {SPOT: self.spot, ON_DEMAND: self.on_demand}.get(market, {})
        return prices.get(machine.type or "")

    @property
    def title(self) -> str:
        """Name, date and regions of the list, as reports show them."""
        where = f" ({', '.join(self.regions)})" if self.regions else ""
        return f"{self.name} of {self.date}{where}"


@dataclass(frozen=True)
class Quote:
    """Price of a machine and its source."""

    hourly: float
    """Price of the whole machine in US dollars per hour."""
    title: str
    """Title of the price list that the price comes from."""


@dataclass(frozen=True)
class Prices:
    """All known prices."""

    lists: tuple[PriceList, ...]
    """Price lists in order of precedence: the first list that has a price wins."""
    seen: Mapping[Machine, float] = field(default_factory=dict)
    """Spot prices in US dollars per hour during the run, from the cloud's price history. They take precedence over all lists."""
    seen_title: str = ""
    """Title of the cloud's price history, as reports show it."""
    notes: tuple[str, ...] = ()
    """Sentences about the prices that reports show."""

    def quote(self, machine: Machine, market: str) -> Quote | None:
        """Return the machine's price on a market, or None if no source has one."""
        if market == SPOT and machine in self.seen:
            return Quote(self.seen[machine], self.seen_title)
        offers = ((prices.hourly(machine, market), prices) for prices in self.lists)
        return next((Quote(hourly, prices.title) for hourly, prices in offers if hourly is not None), None)
