"""What became of a job under faults."""

import pytest

from undula.testing.study import outages_s

STEPS = [float(second) for second in range(10)] + [14.0, 15.0, 16.0, 18.5, 19.0]


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([3.5], [5.0]),
        ([3.5, 9.5], [1.0, 5.0]),
        ([9.5, 9.6, 13.0], [5.0]),  # one stall, of three things that happened
        ([9.5, 16.2], [5.0, 2.5]),
        ([9.5, 14.2], [5.0, 2.5]),
        ([30.0], [0.0]),
        ([], []),
    ],
)
def test_an_outage_is_the_longest_time_without_a_step_up_to_the_next_event(
    events: list[float], found: list[float]
) -> None:
    assert list(outages_s(STEPS, events)) == found
