"""Tests of the deadline policy under arbitrary changes of the spot market."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.plan.fleet import ON_DEMAND, SPOT, FleetSpec
from undula.testing.market import Market, run_under

TOTAL_S = 20_000.0
START_S = 300.0


@given(
    size=st.integers(1, 8),
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=60),
    slack=st.floats(1.05, 2.0),
    start_s=st.floats(60.0, 300.0),
)
def test_a_run_that_on_demand_nodes_can_finish_in_time_is_never_late(
    size: int, counts: list[int], slack: float, start_s: float
) -> None:
    market = Market(tuple(counts), gap_s=600.0)
    # Time that on-demand nodes alone need, with one start at the beginning and two for the safety net.
    deadline_s = int(TOTAL_S * slack + 3 * start_s + 4 * market.decision_s)
    bill = run_under(market, FleetSpec(deadline=f"{deadline_s}s", node_start_s=start_s), size, TOTAL_S)
    assert bill.seconds <= deadline_s


def test_with_enough_spot_nodes_the_cost_is_that_of_the_work_alone() -> None:
    bill = run_under(Market((4,), 600.0), FleetSpec(spot_only=True, node_start_s=START_S), 4, TOTAL_S)
    assert bill.seconds == pytest.approx(TOTAL_S + START_S)
    assert bill.paid_s == {SPOT: pytest.approx(4 * bill.seconds), ON_DEMAND: 0.0}
    assert bill.dollars(spot=1.0, on_demand=3.0) == pytest.approx(4 * bill.seconds / 3600)


def test_preemptions_and_restarts_make_a_run_longer() -> None:
    market = Market((4, 0), 1200.0)
    spec = FleetSpec(spot_only=True, node_start_s=START_S)
    elastic, restarted = run_under(market, spec, 4, TOTAL_S), run_under(market, spec, 4, TOTAL_S, restart_s=75.0)
    assert 2 * TOTAL_S < elastic.seconds < restarted.seconds
    assert elastic.taken > 0
