"""Simulated cost of a run under each fleet policy, on recorded numbers of spot nodes.

`python -m tests.baselines.fleet_costs TRACE... [--hours 24] [--slack 1.25] [--spot 0.35]`: a job that the whole fleet does in so many
hours, with a deadline of so many times that, begun at moments spread over the trace; a spot node costs a share of an on-demand one.
"""

import argparse
import json
from pathlib import Path

from undula.plan.fleet import FleetSpec
from undula.testing.market import Bill, Market, run_under

STARTS = 40
NODE_START_S = 300.0
RESTART_S = 75.0
"""Time in seconds that all workers lose at each change without elasticity, measured with Ray Train 2.60 (docs/elasticity.md)."""
HOUR_S = 3600.0


def contenders(size: int, deadline_s: float) -> dict[str, tuple[FleetSpec, float]]:
    """Return the compared policies by name, each with the time in seconds that all workers lose at each change."""
    spot_only = FleetSpec(spot_only=True, node_start_s=NODE_START_S)
    return {
        "on-demand alone": (FleetSpec(on_demand_floor=size, node_start_s=NODE_START_S), 0.0),
        "`deadline`": (FleetSpec(deadline=f"{deadline_s:.0f}s", node_start_s=NODE_START_S), 0.0),
        "`spot_only`": (spot_only, 0.0),
        "spot alone, all workers restarted at each change": (spot_only, RESTART_S),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--slack", type=float, nargs="+", default=[1.1, 1.25, 1.5])
    parser.add_argument("--spot", type=float, default=0.35, help="price of a spot node, in those of an on-demand one")
    options = parser.parse_args()
    print(
        "| trace | nodes | deadline | policy | late | longest | cost, of on-demand alone |\n|---|---|---|---|---|---|---|"
    )
    for trace in options.traces:
        tree = json.loads(trace.read_text())
        counts, gap_s = tree["data"], tree["metadata"]["gap_seconds"]
        for slack in options.slack:
            size, work_s = max(counts), options.hours * HOUR_S
            alone: list[Bill] = []
            for name, (spec, restart_s) in contenders(size, work_s * slack).items():
                markets = [Market(counts, gap_s, first=start * len(counts) // STARTS) for start in range(STARTS)]
                bills = [run_under(market, spec, size, work_s, restart_s) for market in markets]
                alone = alone or bills
                late = sum(bill.seconds > work_s * slack for bill in bills)
                longest = max(bill.seconds for bill in bills) / HOUR_S
                cost = sum(bill.dollars(options.spot, 1.0) for bill in bills) / sum(
                    bill.dollars(0.0, 1.0) for bill in alone
                )
                print(
                    f"| {trace.stem} | {size} | {options.hours * slack:.4g} h | {name} "
                    f"| {late} of {STARTS} | {longest:.4g} h | {cost:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
