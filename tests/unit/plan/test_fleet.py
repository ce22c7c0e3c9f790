"""Tests of the number of spot and on-demand workers that a policy requests."""

from undula.plan.fleet import Fleet, RemainingWork, by_deadline, on_demand_floor


def remaining(elapsed_s: float, done_s: float) -> RemainingWork:
    return RemainingWork(elapsed_s, deadline_s=1000, total_s=800, done_s=done_s, changeover_s=20)


def wanted(available: Fleet, ready: Fleet, elapsed_s: float, done_s: float, is_urgent: bool = False) -> Fleet:
    return by_deadline(4, available, ready, remaining(elapsed_s, done_s), is_urgent)


def test_on_demand_comes_when_behind_and_stays_until_well_ahead() -> None:
    assert wanted(Fleet(2, 0), Fleet(2, 0), 100, 80) == Fleet(4, 0)
    assert wanted(Fleet(2, 0), Fleet(2, 0), 100, 79) == Fleet(4, 2)
    assert wanted(Fleet(2, 2), Fleet(2, 2), 100, 100) == Fleet(4, 2)  # an even pace has done 80 now and 112 in 40 s
    assert wanted(Fleet(2, 2), Fleet(2, 2), 100, 113) == Fleet(4, 0)
    assert wanted(Fleet(4, 0), Fleet(4, 0), 100, 10) == Fleet(4, 0)  # all nodes are spot already


def test_an_on_demand_node_is_released_when_its_spot_replacement_trains() -> None:
    assert wanted(Fleet(4, 2), Fleet(2, 2), 100, 100) == Fleet(4, 2)
    assert wanted(Fleet(4, 2), Fleet(4, 0), 100, 100) == Fleet(4, 0)


def test_urgent_runs_keep_spot_workers_until_on_demand_ones_are_ready() -> None:
    assert wanted(Fleet(2, 0), Fleet(2, 0), 300, 139, is_urgent=True) == Fleet(4, 4)
    assert wanted(Fleet(2, 3), Fleet(2, 3), 300, 139, is_urgent=True) == Fleet(1, 4)
    assert wanted(Fleet(2, 4), Fleet(0, 4), 300, 139, is_urgent=True) == Fleet(0, 4)


def test_spare_time_is_the_time_left_minus_the_work_left() -> None:
    assert remaining(300, 139).spare_s == 1000 - 300 - (800 - 139)
    assert remaining(1200, 139).time_left_s == -200


def test_an_on_demand_floor_never_exceeds_the_fleet() -> None:
    assert on_demand_floor(4, 1) == Fleet(3, 1)
    assert on_demand_floor(2, 5) == Fleet(0, 2)
