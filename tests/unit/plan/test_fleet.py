"""How many spot and on-demand workers a policy wants."""

from undula.plan.fleet import Fleet, Progress, by_deadline, on_demand_floor


def progress(elapsed_s: float, done_s: float) -> Progress:
    return Progress(elapsed_s, deadline_s=1000, total_s=800, done_s=done_s, changeover_s=20)


def test_on_demand_comes_when_behind_and_stays_until_well_ahead() -> None:
    assert by_deadline(4, Fleet(2, 0), 2, progress(100, 80)) == Fleet(4, 0)
    assert by_deadline(4, Fleet(2, 0), 2, progress(100, 79)) == Fleet(4, 2)
    assert by_deadline(4, Fleet(2, 2), 2, progress(100, 100)) == Fleet(4, 2)  # 80 are expected, and 112 in 40 s
    assert by_deadline(4, Fleet(2, 2), 2, progress(100, 113)) == Fleet(4, 0)
    assert by_deadline(4, Fleet(4, 0), 4, progress(100, 10)) == Fleet(4, 0)  # more than all spot is not to be had


def test_an_on_demand_node_goes_when_the_spot_node_in_its_place_trains() -> None:
    assert by_deadline(4, Fleet(4, 2), 2, progress(100, 100)) == Fleet(4, 2)
    assert by_deadline(4, Fleet(4, 2), 4, progress(100, 100)) == Fleet(4, 0)


def test_all_on_demand_when_the_time_is_only_just_enough() -> None:
    assert by_deadline(4, Fleet(2, 0), 2, progress(300, 139)) == Fleet(0, 4)
    assert by_deadline(4, Fleet(4, 0), 4, progress(300, 139)) == Fleet(4, 0)


def test_a_floor_is_no_more_than_the_fleet() -> None:
    assert on_demand_floor(4, 1) == Fleet(3, 1)
    assert on_demand_floor(2, 5) == Fleet(0, 2)
