"""Tests of the results of validations: which one is best, and when a run stops."""

import json
import math
from collections.abc import Sequence

import pytest

from undula.state.goals import Best, GoalSpec, Mode, StopSpec, ValidationResults, best_of

NAN = math.nan


def results_of(values: Sequence[float]) -> ValidationResults:
    """Return the results of validations after the steps 10, 20, and so on, through the JSON of a checkpoint after each."""
    results = ValidationResults()
    for place, value in enumerate(values):
        results.add(10 * (place + 1), {"loss": value})
        saved = json.loads(json.dumps(results.values()))
        results = ValidationResults()
        results.restore(saved)
    return results


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ([3.0, 2.0, 2.5], "min", Best(20, 2.0, 1)),
        ([3.0, 2.0, 2.5], "max", Best(10, 3.0, 2)),
        ([2.0, 2.0, 2.0], "min", Best(10, 2.0, 2)),
        ([NAN, 5.0, -math.inf], "min", Best(20, 5.0, 1)),
        ([NAN, NAN], "min", Best(None, None, 2)),
        ([0.1 + 0.2, 0.3], "min", Best(20, 0.3, 0)),
    ],
)
def test_the_best_value_is_the_first_one_that_no_finite_value_exceeds(
    values: list[float], mode: Mode, best: Best
) -> None:
    assert results_of(values).best(GoalSpec(mode=mode)) == best


def test_a_validation_counts_once_and_not_before_the_first_step() -> None:
    results = ValidationResults()
    results.add(0, {"loss": 1.0})
    assert results.best(GoalSpec()) is None
    results.add(10, {"loss": 2.0})
    results.add(10, {"loss": 1.0})  # repeated by a group of another size, with other rounding
    assert results.best(GoalSpec()) == Best(10, 2.0, 0)
    assert (results.step, results.means) == (10, {"loss": 2.0})


def test_a_run_stops_once_its_patience_is_exhausted() -> None:
    values = [3.0, 2.0, 2.5, 2.1, 1.0]
    stop = StopSpec(patience=2)
    assert [bool(results_of(values[:count]).reason_to_stop(stop)) for count in range(6)] == [0, 0, 0, 0, 1, 0]
    assert results_of(values[:4]).reason_to_stop(stop) == (
        "loss has not improved in the last 2 validations, and its best value is 2, after step 20"
    )
    assert results_of([NAN]).reason_to_stop(StopSpec(patience=1)) == "loss was not finite in the last validation"
    assert not results_of(values[:4]).reason_to_stop(None)
    assert not results_of(values[:4]).reason_to_stop(StopSpec(patience=2, metric="accuracy"))


def test_the_best_of_several_states_is_the_earlier_one_of_equal_values() -> None:
    states = {f"state {count}": results_of([3.0, 2.0, 2.0][:count]) for count in (3, 2, 1)}
    assert best_of(states, GoalSpec()) == "state 2"
    assert best_of(states, GoalSpec(mode="max")) == "state 1"
    assert best_of(states, GoalSpec("accuracy")) is None
