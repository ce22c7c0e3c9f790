"""Tests of the cost: dollars add up over the classes, and workers without a price are reported and never count as free."""

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from priced_run import write_priced_run
from rich.console import Console

from undula.cluster.prices import load_prices
from undula.plan.prices import PriceList, Prices
from undula.report.data.cost import Cost, cost
from undula.report.data.goodput import CLASSES, Allocation, allocations
from undula.report.data.run_record import read_run
from undula.report.render.cost_text import cost_lines
from undula.report.render.page import write_report
from undula.report.render.terminal import print_run
from undula.report.text import dollars
from undula.state.events import Event
from undula.storage import Store

LIST = PriceList("ours", "2026-11-22", "", ("here",), {"a": 3.6, "b": 7.2, "c": 1.0}, {"a": 0.36, "b": 0.72})
PRICES = Prices((LIST,))
HOUR = {"useful": 3600.0}


def worker(machine: str | None, market: str | None, node: str = "", **more: object) -> dict[str, object]:
    labels = {"machine": machine, "market": market, "node": node} | more
    return {name: value for name, value in labels.items() if value is not None}


def shipped(events: Sequence[Event]) -> Prices:
    return load_prices()


def lines(found: Cost) -> dict[str, str]:
    return dict(cost_lines(found))


def test_each_rank_pays_its_share_of_its_node() -> None:
    workers = (worker("a", "spot", "n1"), worker("b", "on-demand", "n2"), worker("b", "on-demand", "n2"))
    found = cost([Allocation(workers, {"useful": 1800.0, "capacity": 1800.0})], PRICES, samples=2000, steps=10)
    # One spot node a at 0.36 and one node b at 7.2, which two ranks share, are held for an hour, half of which is spent waiting.
    assert found.total == pytest.approx(7.56)
    assert found.dollars["useful"] == found.dollars["capacity"] == pytest.approx(3.78)
    assert found.by_market == pytest.approx({"spot": 0.36, "on-demand": 7.2})
    assert found.on_demand == pytest.approx(3.6 + 7.2)
    assert found.saved == pytest.approx(1 - 7.56 / 10.8)
    assert (found.wasted, found.per_1000_samples, found.per_step) == pytest.approx((3.78, 3.78, 0.756))


def test_runs_beside_each_other_add_up_to_the_bill_of_their_node() -> None:
    """Eight runs with one GPU each share a p4d.24xlarge for an hour, in which one of them waits."""
    prices = load_prices()
    runs = [
        cost([Allocation((worker("p4d.24xlarge", "on-demand", "n1", pid=pid, share=1 / 8),), spent)], prices, 1, 1)
        for pid, spent in enumerate([HOUR] * 7 + [{"capacity": 3600.0}])
    ]
    assert sum(run.total for run in runs) == pytest.approx(21.957642)
    assert sum(run.on_demand or 0.0 for run in runs) == pytest.approx(21.957642)
    assert [run.total for run in runs] == [runs[0].total] * 8
    half = cost([Allocation((worker("a", "spot", "n1", share=0.25),) * 2, HOUR)], PRICES, 1, 1)
    assert half.total == pytest.approx(0.18), "two workers of one run hold a quarter of the node each"


WORKERS = st.builds(
    worker, st.sampled_from("abcd"), st.sampled_from(["spot", "on-demand"]), st.sampled_from(["", "n1", "n2"])
)
ALLOCATIONS = st.builds(
    Allocation, st.lists(WORKERS, max_size=4).map(tuple), st.dictionaries(st.sampled_from(CLASSES), st.floats(0, 1e6))
)


@given(st.lists(ALLOCATIONS, max_size=5))
def test_the_dollars_of_all_classes_add_up_to_the_cost(held: list[Allocation]) -> None:
    found = cost(held, PRICES, samples=0, steps=0)
    spent, full, without = 0.0, 0.0, 0.0
    for allocation in held:
        seconds = sum(allocation.seconds.values())
        for each in allocation.workers:
            hourly = (LIST.spot if each["market"] == "spot" else LIST.on_demand).get(str(each["machine"]))
            peers = sum(other["node"] == each["node"] for other in allocation.workers) if each["node"] else 1
            if hourly is None:
                without += seconds
            else:
                spent += seconds / 3600 * hourly / peers
                full += seconds / 3600 * LIST.on_demand[str(each["machine"])] / peers
    assert found.total == pytest.approx(spent)
    assert sum(found.by_market.values()) == pytest.approx(spent)
    assert found.on_demand == pytest.approx(full)
    assert found.wasted + found.dollars["useful"] == pytest.approx(spent)
    assert sum(each.seconds for each in found.unpriced) == pytest.approx(without)
    assert found.per_step is found.per_1000_samples is None


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (worker("m9.huge", "on-demand"), "2 workers for 2 h 00 min of rank time: the price of m9.huge is unknown; add it with --prices"),
        (worker("c", "spot"), "the spot price of c is unknown; add it with --prices FILE, or query AWS with --spot-prices aws"),
        (worker("a", "spot", region="elsewhere"), "the spot price of a in elsewhere is unknown"),
        (worker("a", None), "of rank time on a: the nodes have no market; label them undula.io/market=spot or undula.io/market=on-demand"),
        (worker("a", "free"), "label them undula.io/market=spot or undula.io/market=on-demand"),
        (worker(None, None), "the nodes have no label undula.io/machine"),
        (worker("x\x1b[2J", "on-demand"), "the price of x [2J is unknown"),
    ],
)  # fmt: skip
def test_a_worker_without_a_price_is_reported_and_counts_in_no_sum(missing: dict[str, object], sentence: str) -> None:
    workers = (worker("a", "on-demand"), missing | {"node": "n1"}, missing | {"node": "n2"})
    found = cost([Allocation(workers, HOUR), Allocation(workers[:1], HOUR)], PRICES, samples=1, steps=1)
    assert found.total == found.on_demand == pytest.approx(7.2)
    (unpriced,) = found.unpriced
    assert (unpriced.workers, unpriced.seconds) == (2, 7200.0)
    assert sentence in lines(found)["without a price"]
    assert lines(found)["cost"] == "at least $7.20: $7.20 on-demand"
    assert lines(found)["per committed step"] == "at least $7.20"


def test_a_run_without_any_price_has_no_sum() -> None:
    found = cost([Allocation((worker("m9.huge", "spot"),), HOUR)], PRICES, samples=1, steps=1)
    assert [label for label, _ in cost_lines(found)] == ["without a price"]


def test_without_an_on_demand_price_the_saving_is_unknown() -> None:
    only_spot = Prices((PriceList("ours", "2026", "", (), {}, {"a": 0.36}),))
    found = cost([Allocation((worker("a", "spot"),), HOUR)], only_spot, samples=1, steps=1)
    assert (found.on_demand, found.saved) == (None, None)
    assert "have no known on-demand price" in lines(found)["all on-demand"]


def test_spot_nodes_that_cost_more_are_reported_as_such() -> None:
    dear = Prices((PriceList("ours", "2026", "", (), {"a": 1.0}, {"a": 1.5}),))
    found = cost([Allocation((worker("a", "spot"),), HOUR)], dear, samples=1, steps=1)
    assert lines(found)["all on-demand"] == "$1.00 for the same seconds: 50% more was paid"


def test_dollars_are_formatted_by_size() -> None:
    assert [dollars(v) for v in (0.0, 2.1e-5, 0.0431, 0.5, 1.0, 12.345, 1234.5)] == [
        "$0", "$2.1e-5", "$0.0431", "$0.500", "$1.00", "$12.35", "$1,234.50"
    ]  # fmt: skip


def test_a_run_on_spot_is_priced_from_its_ledger(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_priced_run(store)
    run = read_run(store)
    # The run holds two spot nodes for 61 minutes, one for 15, one with an on-demand node for 75, one for 1, one that waits for 20, and two
    # for 68.
    spot_minutes, on_demand_minutes = 61 * 2 + 15 + 75 + 1 + 20 + 68 * 2, 75
    assert sum(
        len(each.workers) * sum(each.seconds.values()) for each in allocations(run.ledger, run.events)
    ) == pytest.approx((spot_minutes + on_demand_minutes) * 60)
    document = shown_as_json(store)["cost"]
    assert document["by_market"]["on-demand"] == pytest.approx(on_demand_minutes / 60 * 0.8048)
    assert document["by_market"]["spot"] == pytest.approx(spot_minutes / 60 * 0.4307)
    assert document["dollars"]["capacity"] == pytest.approx(20 / 60 * 0.4307)
    assert sum(document["dollars"].values()) == pytest.approx(document["total"])
    assert document["per_step"] == pytest.approx(document["total"] / 1178)


def shown_as_json(store: Store) -> dict[str, dict[str, object]]:
    with pytest.MonkeyPatch.context() as patch:
        file = io.StringIO()
        patch.setattr("sys.stdout", file)
        print_run(store, True, shipped)
    return json.loads(file.getvalue())  # type: ignore[no-any-return]


@pytest.mark.parametrize("width", [80, 130])
def test_a_terminal_shows_the_cost_of_waiting(tmp_path: Path, width: int) -> None:
    store, file = Store(str(tmp_path)), io.StringIO()
    write_priced_run(store, ("m9.huge", "spot"))
    print_run(store, prices=shipped, console=Console(file=file, width=width))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"waiting for capacity +\$0\.144", text)
    assert "m9.huge" in text
    assert "…" not in text


def test_the_page_shows_the_cost_and_no_markup_of_others(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_priced_run(store, ("<b>evil</b>", "spot"))
    html = Path(write_report(store, shipped)).read_text(encoding="utf-8")
    assert 'class="g-capacity"' in html
    assert "39% saved" not in html
    assert "<b>evil" not in html
    assert "the spot price of &lt;b&gt;evil&lt;/b&gt; is unknown" in html
    assert html.count("<h2>Cost</h2>") == 1


def test_a_run_on_machines_without_labels_has_no_cost(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_priced_run(store, other=("", ""), spot=("", ""))
    assert shown_as_json(store)["cost"] is None
    assert "<h2>Cost</h2>" not in Path(write_report(store, shipped)).read_text(encoding="utf-8")
