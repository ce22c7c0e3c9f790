"""How many spot and on-demand workers a policy wants."""

from undula.plan.fleet import Fleet, RemainingWork, by_deadline, on_demand_floor


def remaining(elapsed_s: float, done_s: float) -> RemainingWork:
    return RemainingWork(elapsed_s, deadline_s=1000, total_s=800, done_s=done_s, changeover_s=20)


def wanted(there: Fleet, ready: Fleet, elapsed_s: float, done_s: float, hurries: bool = False) -> Fleet:
    return by_deadline(4, there, ready, remaining(elapsed_s, done_s), hurries)


def test_on_demand_comes_when_behind_and_stays_until_well_ahead() -> None:
    assert wanted(Fleet(2, 0), Fleet(2, 0), 100, 80) == Fleet(4, 0)
    assert wanted(Fleet(2, 0), Fleet(2, 0), 100, 79) == Fleet(4, 2)
    assert wanted(Fleet(2, 2), Fleet(2, 2), 100, 100) == Fleet(4, 2)  # 80 are expected, and 112 in 40 s
    assert wanted(Fleet(2, 2), Fleet(2, 2), 100, 113) == Fleet(4, 0)
    assert wanted(Fleet(4, 0), Fleet(4, 0), 100, 10) == Fleet(4, 0)  # more than all spot is not to be had


def test_an_on_demand_node_goes_when_the_spot_node_in_its_place_trains() -> None:
    assert wanted(Fleet(4, 2), Fleet(2, 2), 100, 100) == Fleet(4, 2)
    assert wanted(Fleet(4, 2), Fleet(4, 0), 100, 100) == Fleet(4, 0)


def test_in_a_hurry_spot_keeps_what_on_demand_has_not_taken_over() -> None:
    assert wanted(Fleet(2, 0), Fleet(2, 0), 300, 139, hurries=True) == Fleet(4, 4)
    assert wanted(Fleet(2, 3), Fleet(2, 3), 300, 139, hurries=True) == Fleet(1, 4)
    assert wanted(Fleet(2, 4), Fleet(0, 4), 300, 139, hurries=True) == Fleet(0, 4)


def test_time_to_spare_is_what_the_work_leaves() -> None:
    assert remaining(300, 139).spare_s == 1000 - 300 - (800 - 139)
    assert remaining(1200, 139).time_left_s == -200


def test_a_floor_is_no_more_than_the_fleet() -> None:
    assert on_demand_floor(4, 1) == Fleet(3, 1)
    assert on_demand_floor(2, 5) == Fleet(0, 2)
