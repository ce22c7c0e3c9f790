"""Cost of a run as lines of text, which the terminal and the report share."""

from collections.abc import Mapping

from undula.plan.fleet import SPOT
from undula.plan.prices import MARKETS
from undula.report.data.cost import Cost, Unpriced
from undula.report.text import counted, dollars, duration, printable

COST_LABELS: Mapping[str, str] = {
    "useful": "useful work",
    "replayed": "replayed steps",
    "restarting": "starting workers",
    "checkpoint": "blocked on checkpoints",
    "data": "waiting for data",
    "capacity": "waiting for capacity",
}
"""Labels of the classes of goodput in a cost."""


def cost_lines(cost: Cost) -> list[tuple[str, str]]:
    """Return a cost as lines, each with a label and a value."""
    lines = []
    if cost.total:
        least = "at least " if cost.unpriced else ""
        parts = ", ".join(f"{dollars(cost.by_market[market])} {market}" for market in MARKETS if cost.by_market[market])
        lines.append(("cost", f"{least}{dollars(cost.total)}: {parts}"))
        if cost.per_step is not None and cost.per_1000_samples is not None:
            lines.append(("per 1,000 samples", least + dollars(cost.per_1000_samples)))
            lines.append(("per committed step", least + dollars(cost.per_step)))
        if cost.by_market[SPOT]:
            lines.append(("all on-demand", _on_demand_text(cost)))
        lines.append(("wasted", f"{least}{dollars(cost.wasted)}, {cost.wasted / cost.total:.1%} of it"))
        lines.append(("prices", "; ".join(cost.quoted)))
    lines += [("without a price", _unpriced_text(unpriced)) for unpriced in cost.unpriced]
    return lines + [("note", printable(note)) for note in cost.notes]


def _on_demand_text(cost: Cost) -> str:
    if cost.on_demand is None or cost.saved is None:
        return "unknown, because some machines have no known on-demand price; add it with --prices FILE"
    difference = f"{cost.saved:.0%} saved" if cost.saved >= 0 else f"{-cost.saved:.0%} more was paid"
    return f"{dollars(cost.on_demand)} for the same seconds: {difference}"


def _unpriced_text(missing: Unpriced) -> str:
    machine, who = missing.machine, f"{counted(missing.workers, 'worker')} for {duration(missing.seconds)} of rank time"
    if machine.type is None:
        return f"{who}: the nodes have no label undula.io/machine"
    kind = printable(machine.type, 60)
    if machine.market not in MARKETS:
        return (
            f"{who} on {kind}: the nodes have no market; label them undula.io/market=spot or undula.io/market=on-demand"
        )
    where = f" in {printable(machine.region, 60)}" if machine.region else ""
    if machine.market == SPOT:
        return f"{who}: the spot price of {kind}{where} is unknown; add it with --prices FILE, or query AWS with --spot-prices aws"
    return f"{who}: the price of {kind}{where} is unknown; add it with --prices FILE"
