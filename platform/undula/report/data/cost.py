"""Cost of a run: its rank-seconds multiplied by the hourly prices of the machines that the ranks ran on. Pure.

The cost covers the time in which workers were in a group, or were ready while their group waited for others, and the share of their nodes
that they reserved. It does not cover the head, disks, network traffic, resources that nothing has reserved, or nodes that boot or prepare
a worker, because these are not rank-seconds.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from undula.plan.fleet import ON_DEMAND
from undula.plan.prices import MARKETS, Machine, Prices
from undula.report.data.goodput import CLASSES, Allocation, Floats, allocations
from undula.report.data.run_record import RecordedRun
from undula.state.events import Event, GroupEvent, WaitingEvent, WorkerPlace
from undula.state.ledger import steps_done

PriceFinder = Callable[[Sequence[Event]], Prices]
"""Function from a run's events to the prices at the time of the run."""
HOUR_S = 3600.0


@dataclass(frozen=True)
class Unpriced:
    """Workers on a machine without a known price."""

    machine: Machine
    workers: int
    """Number of workers."""
    seconds: float
    """Rank-seconds of all of these workers."""


@dataclass(frozen=True)
class Cost:
    """Cost of a run's workers in US dollars. Workers without a price are in `unpriced` and count in no sum."""

    dollars: Mapping[str, float]
    """Dollars by class of `undula.report.data.goodput`."""
    by_market: Mapping[str, float]
    """Dollars by market of the machine. They have the same sum as `dollars`."""
    on_demand: float | None
    """Dollars for the same seconds on on-demand machines; None if a price is unknown."""
    samples: int
    """Number of samples of the committed steps."""
    steps: int
    """Number of committed steps of the plan."""
    unpriced: tuple[Unpriced, ...]
    quoted: tuple[str, ...]
    """Titles of the price lists that were used."""
    notes: tuple[str, ...]
    """Remarks on the prices, as sentences."""

    @property
    def total(self) -> float:
        return sum(self.dollars.values())

    @property
    def wasted(self) -> float:
        """Dollars for everything except useful work."""
        return self.total - self.dollars["useful"]

    @property
    def saved(self) -> float | None:
        """Share of the on-demand cost that was saved; negative if more was paid."""
        return 1 - self.total / self.on_demand if self.on_demand else None

    @property
    def per_1000_samples(self) -> float | None:
        return self.total / self.samples * 1000 if self.samples else None

    @property
    def per_step(self) -> float | None:
        return self.total / self.steps if self.steps else None

    def as_json(self) -> dict[str, Any]:
        names = ("total", "wasted", "saved", "per_1000_samples", "per_step")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


def cost_of(run: RecordedRun, prices: PriceFinder) -> Cost | None:
    """Return the cost of a run, or None if no node has a machine label, as on your own machines."""
    steps, held = run.ledger.steps, list(allocations(run.ledger, run.events))
    if not any(worker.get("machine") for allocation in held for worker in allocation.workers):
        return None
    samples = int(steps["samples"][-1].as_py()) if len(steps) else 0
    return cost(held, prices(run.events), samples, steps_done(steps))


def dollars_at(run: RecordedRun, prices: PriceFinder, times: Floats) -> Floats | None:
    """Return the cost of a run's workers up to each time, or None if not all of it is known.

    Args:
        run: The run.
        prices: Prices of machines.
        times: Times in seconds since the epoch, with shape [times].
    """
    known = cost_of(run, prices)
    if known is None or known.unpriced:
        return None
    quotes = prices(run.events)
    starts = [event.time for event in run.events if isinstance(event, GroupEvent | WaitingEvent)]
    knots, spent = [0.0], [0.0]
    for start, allocation in zip(starts, allocations(run.ledger, run.events), strict=True):
        end = start + sum(allocation.seconds.values())
        knots += [start, end]
        spent += [spent[-1], spent[-1] + cost([allocation], quotes, 0, 0).total]
    return np.interp(times, knots, spent)


def cost(held: Iterable[Allocation], prices: Prices, samples: int, steps: int) -> Cost:
    """Return the cost of allocations. A worker pays for its share of its node, so runs beside each other add up to the node's price.

    Args:
        held: The allocations of a run.
        prices: Prices of machines.
        samples: Number of samples of the committed steps.
        steps: Number of committed steps.
    """
    by_class, by_market = dict.fromkeys(CLASSES, 0.0), dict.fromkeys(MARKETS, 0.0)
    on_demand: float | None = 0.0
    quoted: dict[str, None] = {}
    missing: dict[Machine, list[tuple[Any, float]]] = defaultdict(list)
    for allocation in held:
        held_s = sum(allocation.seconds.values())
        for worker, share in node_shares(allocation.workers):
            machine = Machine.of(worker)
            market = machine.market or ""
            quote, full = prices.quote(machine, market), prices.quote(machine, ON_DEMAND)
            if quote is None:
                missing[machine].append(((worker.get("node"), worker.get("pid")), held_s))
                continue
            for name, spent_s in allocation.seconds.items():
                by_class[name] += spent_s / HOUR_S * quote.hourly * share
            by_market[market] += held_s / HOUR_S * quote.hourly * share
            on_demand = None if on_demand is None or full is None else on_demand + held_s / HOUR_S * full.hourly * share
            quoted |= dict.fromkeys(rate.title for rate in (quote, full) if rate)
    unpriced = tuple(
        Unpriced(machine, len({worker for worker, _ in entries}), sum(seconds for _, seconds in entries))
        for machine, entries in missing.items()
    )
    return Cost(by_class, by_market, on_demand, samples, steps, unpriced, tuple(quoted), prices.notes)


def node_shares(workers: Sequence[WorkerPlace]) -> Iterable[tuple[WorkerPlace, float]]:
    """Return each worker with the share of its node that it pays for.

    A ledger without shares is older, or the node was lost when the event was written. There, the run's workers on a node pay for the whole
    node, and a worker without a node id counts as the only one on its node.
    """
    peers = Counter(worker.get("node") for worker in workers)
    return (
        (worker, worker.get("share") or (1 / peers[worker["node"]] if worker.get("node") else 1.0))
        for worker in workers
    )
