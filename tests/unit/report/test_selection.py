"""Tests of the selection and the order of listed runs."""

import math

import pytest

from undula.errors import SpecError
from undula.report.data.selection import selection

RUNS = {
    "a": {"run": "a", "state": "finished", "steps": 100, "last_validation_loss": 2.5, "schedule.base_lr": 0.001, "stop": None},
    "b": {"run": "b", "state": "stopped", "steps": 20, "last_validation_loss": None, "schedule.base_lr": 0.01, "stop.patience": 3},
    "c": {"run": "c", "state": "finished", "steps": 60, "last_validation_loss": 1.5, "deterministic": True, "plan.seed": 1},
    "d": {"run": "d", "state": "running", "steps": 5, "last_validation_loss": math.nan, "tag": "007", "mode": "on", "day": "2026-01-15"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ([], "abcd"),
        (["state=finished"], "ac"),
        (["state != finished"], "bd"),
        (["steps>=60"], "ac"),
        (["steps<60", "state=stopped"], "b"),
        (["last_validation_loss<2"], "c"),
        (["schedule.base_lr==1e-3"], "a"),
        (["schedule.base_lr=0.0010"], "a"),
        (["schedule.base_lr>1e-3"], "b"),
        (["deterministic=true"], "c"),
        (["plan.seed=true"], ""),
        (["plan.seed=1.0"], "c"),
        (["stop=null"], "a"),
        (["stop!=null"], "bcd"),
        (["run>b"], "cd"),
        (["tag=007"], "d"),
        (["tag!=007"], "abc"),
        (["mode=on"], "d"),
        (["day=2026-01-15"], "d"),
    ],
)
def test_conditions_select_runs(where: list[str], names: str) -> None:
    assert "".join(selection(where, None).of(RUNS)) == names


@pytest.mark.parametrize(
    ("sort", "names"),
    [("steps", "dbca"), ("-steps", "acbd"), ("last_validation_loss", "cabd"), ("-last_validation_loss", "acbd"),
     ("state", "acdb"), ("-run", "dcba")],
)  # fmt: skip
def test_runs_without_a_finite_value_come_last_in_either_order(sort: str, names: str) -> None:
    assert "".join(selection([], sort).of(RUNS)) == names


def test_ids_that_a_float_would_round_have_their_order() -> None:
    runs = {name: {"config.id": 2**53 + more} for name, more in (("a", 2), ("b", 1), ("c", 0))}
    assert "".join(selection([], "config.id").of({**runs, "d": {"config.id": 0.5}})) == "dcba"
    assert "".join(selection([f"config.id>{2**53}"], None).of(runs)) == "ab"


def test_mistakes_are_refused_with_the_keys_that_exist() -> None:
    with pytest.raises(SpecError, match=r"--where 'steps' is no condition; write KEY=VALUE"):
        selection(["steps"], None)
    with pytest.raises(SpecError, match=r"no run has 'base_lr'; .* \(schedule\.base_lr\)"):
        selection([], "base_lr").of(RUNS)
    assert selection(["anything=1"], None).of({}) == []
