"""What a run has cost: the rank-seconds of undula.report.data.goodput times what the machines under them cost an hour. Pure.

Counted is what workers held, from when they were in a group, or ready while their group waited. The head, disks, traffic, and nodes
that boot or on which a worker is still being made ready are in no rank-second, and so in no dollar of it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from undula.plan.fleet import ON_DEMAND, SPOT
from undula.plan.prices import MARKETS, Machine, Prices
from undula.report.data.goodput import CLASSES, Hold, holds
from undula.report.data.summary import RecordedRun, counted, duration, number, printable
from undula.state.events import Event, WorkerPlace
from undula.state.ledger import steps_done

PriceFinder = Callable[[Sequence[Event]], Prices]
"""The prices of the time of a run, given its events."""
HOUR_S = 3600.0
DOING = {
    "useful": "in work that stands",
    "replayed": "in work that was done again",
    "restarting": "while starting",
    "checkpoint": "while held up by checkpoints",
    "data": "while waiting for data",
    "capacity": "while waiting for capacity",
}
"""The classes of goodput in words that follow a sum of dollars."""


@dataclass(frozen=True)
class Unpriced:
    """Workers whose machines nobody knows a price of."""

    machine: Machine
    workers: int
    seconds: float
    """Of all of them together."""


@dataclass(frozen=True)
class Cost:
    """What a run's workers have cost, in US dollars; of those without a price, nothing is in any sum."""

    dollars: Mapping[str, float]
    """By class of undula.report.data.goodput."""
    by_market: Mapping[str, float]
    """The same dollars, by market of the machine."""
    on_demand: float | None
    """What the same seconds had cost on on-demand machines; None where a price of one is not known."""
    samples: int
    """That stand."""
    steps: int
    """Of the plan, that are committed."""
    unpriced: tuple[Unpriced, ...]
    quoted: tuple[str, ...]
    """The prices' titles."""
    notes: tuple[str, ...]
    """What else is to be told of the prices, in sentences."""

    @property
    def total(self) -> float:
        return sum(self.dollars.values())

    @property
    def wasted(self) -> float:
        """For everything but work that stands."""
        return self.total - self.dollars["useful"]

    @property
    def saved(self) -> float | None:
        """The share that all on-demand machines would have cost more."""
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
    """What a run has cost; None where no node had a label of its machine, as on machines of one's own."""
    steps, held = run.ledger.steps, list(holds(run.ledger, run.events))
    if not any(worker.get("machine") for hold in held for worker in hold.workers):
        return None
    samples = int(steps["samples"][-1].as_py()) if len(steps) else 0
    return cost(held, prices(run.events), samples, steps_done(steps))


def cost(held: Iterable[Hold], prices: Prices, samples: int, steps: int) -> Cost:
    """The dollars of rank-seconds. Workers on one node share its price evenly, however many more it has room for.

    Args:
        held: who was held when.
        prices: of machines.
        samples: that stand, of the whole run.
        steps: that are committed.
    """
    by_class, by_market = dict.fromkeys(CLASSES, 0.0), dict.fromkeys(MARKETS, 0.0)
    on_demand: float | None = 0.0
    quoted: dict[str, None] = {}
    missing: dict[Machine, list[tuple[Any, float]]] = defaultdict(list)
    for hold in held:
        hold_s = sum(hold.seconds.values())
        for worker, share in shares(hold.workers):
            machine = Machine.of(worker)
            market = machine.market or ""
            quote, full = prices.quote(machine, market), prices.quote(machine, ON_DEMAND)
            if quote is None:
                missing[machine].append(((worker.get("node"), worker.get("pid")), hold_s))
                continue
            for name, spent_s in hold.seconds.items():
                by_class[name] += spent_s / HOUR_S * quote.hourly * share
            by_market[market] += hold_s / HOUR_S * quote.hourly * share
            on_demand = None if on_demand is None or full is None else on_demand + hold_s / HOUR_S * full.hourly * share
            quoted |= dict.fromkeys(each.title for each in (quote, full) if each)
    unpriced = tuple(
        Unpriced(machine, len({who for who, _ in told}), sum(held_s for _, held_s in told))
        for machine, told in missing.items()
    )
    return Cost(by_class, by_market, on_demand, samples, steps, unpriced, tuple(quoted), prices.notes)


def shares(workers: Sequence[WorkerPlace]) -> Iterable[tuple[WorkerPlace, float]]:
    """Workers, each with its share of its node; one whose node is not told has a node of its own."""
    peers = Counter(worker.get("node") for worker in workers)
    return ((worker, 1 / peers[worker["node"]] if worker.get("node") else 1.0) for worker in workers)


def cost_rows(found: Cost) -> list[tuple[str, str]]:
    """A cost in words: what, and how much."""
    rows = []
    if found.total:
        least = "at least " if found.unpriced else ""
        parts = ", ".join(f"{dollars(found.by_market[each])} {each}" for each in MARKETS if found.by_market[each])
        rows.append(("cost", f"{least}{dollars(found.total)}: {parts}"))
        if found.per_step is not None and found.per_1000_samples is not None:
            rows.append(("per 1,000 samples", least + dollars(found.per_1000_samples)))
            rows.append(("per committed step", least + dollars(found.per_step)))
        if found.by_market[SPOT]:
            rows.append(("all on-demand", _on_demand_words(found)))
        rows.append(("wasted", f"{least}{dollars(found.wasted)}, {found.wasted / found.total:.1%} of it"))
        rows.append(("prices", "; ".join(found.quoted)))
    rows += [("without a price", _unpriced_words(each)) for each in found.unpriced]
    return rows + [("note", printable(each)) for each in found.notes]


def dollars(amount: float) -> str:
    """$1,234.50, $0.043, $2.1e-5."""
    return f"${amount:,.2f}" if amount >= 1 else f"${number(amount, 3)}"


def _on_demand_words(found: Cost) -> str:
    if found.on_demand is None or found.saved is None:
        return "no on-demand price is known of some of the machines: give it with --prices FILE"
    verdict = f"{found.saved:.0%} saved" if found.saved >= 0 else f"{-found.saved:.0%} more was paid"
    return f"{dollars(found.on_demand)} for the same seconds: {verdict}"


def _unpriced_words(missing: Unpriced) -> str:
    machine, who = missing.machine, f"{counted(missing.workers, 'worker')} for {duration(missing.seconds)} of rank time"
    if machine.type is None:
        return f"{who}: their nodes have no label undula.io/machine"
    kind = printable(machine.type, 60)
    if machine.market not in MARKETS:
        return f"{who} on {kind}: label their nodes undula.io/market=spot or =on-demand"
    where = f" in {printable(machine.region, 60)}" if machine.region else ""
    if machine.market == SPOT:
        return (
            f"{who}: no spot price of {kind}{where} is known: give it with --prices FILE, or ask with --spot-prices aws"
        )
    return f"{who}: no price of {kind}{where} is known: give it with --prices FILE"
