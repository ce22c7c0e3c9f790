"""The matrix of features.py: each row comes to the same numbers at any world size, through hand-overs and resumes, and as a row like it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from features import FEATURES, Group, Origin, numbers_of, origins_of, train_in_groups
from horovod_ranks import on_horovod_ranks
from numbers_job import lost_variables
from ranks import on_ranks

Numbers = dict[str, list[Any]]


@dataclass(frozen=True)
class Scenario:
    """Groups in which the rows are trained, one after another."""

    parts: tuple[tuple[int, tuple[Group, ...]], ...] = ((1, (Group(),)),)
    """World size and groups of each set of processes."""
    default_device: str | None = None
    reads_ahead: bool = False
    rows: tuple[str, ...] = tuple(FEATURES)
    """Names of the rows."""

    @property
    def origins(self) -> list[Origin | None]:
        """Places from which the groups have the state."""
        groups = [group for _, groups in self.parts for group in groups]
        return [None, *(group.origin for group in groups[:-1])]


WITH_ANOTHER_DEVICE = tuple(name for name in FEATURES if "shard" not in name and "gathers" not in name)
"""Rows that train with another default device, with which torch's fully_shard does not work."""
MAKING_TENSORS = ("noise scale", "BatchNorm", "fp16", "lamb", "counts in buffers", "sparse gradients")
"""Those in which the library makes tensors of each kind itself."""
INTERRUPTED = ((1, (Group(1), Group(3, "the checkpoint"), Group(5, "the memory of a node"), Group())),)
BY_CHECKPOINT = ((3, (Group(3, "the checkpoint"),)), (2, (Group(),)))
BY_MEMORY = ((3, (Group(5, "the memory of a node"),)), (2, (Group(),)))
SCENARIOS = {
    "interrupted": Scenario(INTERRUPTED, reads_ahead=True, rows=tuple(FEATURES)[::3]),
    "on three ranks, and from their checkpoint on two": Scenario(BY_CHECKPOINT, rows=tuple(FEATURES)[::2]),
    "on three ranks, and from their memory on two": Scenario(BY_MEMORY, reads_ahead=True, rows=tuple(FEATURES)[1::2]),
    "on two ranks, with another default device": Scenario(((2, (Group(),)),), "meta", rows=MAKING_TENSORS),
}
"""Scenarios whenever tests run. Each row trains on one rank, and on three and two."""
OTHERS = {
    "interrupted": Scenario(INTERRUPTED, reads_ahead=True),
    "on three ranks, and from their checkpoint on two": Scenario(BY_CHECKPOINT, rows=tuple(FEATURES)[1::2]),
    "on three ranks, and from their memory on two": Scenario(BY_MEMORY, reads_ahead=True, rows=tuple(FEATURES)[::2]),
    "interrupted, with another default device": Scenario(INTERRUPTED, "meta", rows=WITH_ANOTHER_DEVICE),
    "on two ranks, with another default device": Scenario(((2, (Group(),)),), "meta", rows=WITH_ANOTHER_DEVICE),
}
"""The rest of the rows and scenarios, for a night."""
HOROVOD = ("plain", "clipped", "sparse gradients", "rule noise_scale", "lars", "lamb")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scenario], dict[str, list[Numbers]]]:
    """Function that trains all rows in a scenario, once, and returns the numbers of each rank by row.

    Processes that start for one row only would take most of the time.
    """

    @cache
    def of(scenario: Scenario) -> dict[str, list[Numbers]]:
        folder = tmp_path_factory.mktemp("runs")
        jobs = {name: FEATURES[name].job(folder / name) for name in scenario.rows}
        for world_size, groups in scenario.parts:
            ranks = on_ranks(world_size, train_in_groups, jobs, groups, scenario.default_device, scenario.reads_ahead)
        for name, job in jobs.items():
            assert origins_of(job) == scenario.origins, name
            assert lost_variables(job.run_url) == [], name
        return {name: [numbers_of(job) | rank[name] for rank in ranks] for name, job in jobs.items()}

    return of


def assert_same(ranks: list[Numbers], expected: Numbers) -> None:
    for numbers in ranks:
        assert numbers.keys() == expected.keys()
        for name, values in expected.items():
            assert numbers[name] == values, name


def cases(scenarios: dict[str, Scenario]) -> Any:
    """Return the mark of a test that looks at each row of each scenario."""
    found = [(of, name) for of in scenarios.values() for name in of.rows]
    names = [f"{key}-{name}" for key, of in scenarios.items() for name in of.rows]
    return pytest.mark.parametrize(("scenario", "name"), found, ids=names)


@cases(SCENARIOS)
def test_a_feature_has_the_same_numbers_wherever_it_trains(scenario: Scenario, name: str, outcome: Any) -> None:
    (expected,) = outcome(Scenario())[name]
    assert_same(outcome(scenario)[name], expected)


@pytest.mark.nightly
@cases(OTHERS)
def test_each_feature_has_the_same_numbers_in_each_scenario(scenario: Scenario, name: str, outcome: Any) -> None:
    (expected,) = outcome(Scenario())[name]
    assert_same(outcome(scenario)[name], expected)


@pytest.fixture(scope="module")
def with_horovod(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Numbers]]:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed: make horovod")
    folder = tmp_path_factory.mktemp("horovod")
    jobs = {name: replace(FEATURES[name].job(folder / name), engine="horovod") for name in HOROVOD}
    ranks = on_horovod_ranks(2, train_in_groups, jobs)
    return {name: [numbers_of(job) | rank[name] for rank in ranks] for name, job in jobs.items()}


@pytest.mark.parametrize("name", HOROVOD)
def test_a_feature_has_the_same_numbers_with_horovod(name: str, with_horovod: Any, outcome: Any) -> None:
    (expected,) = outcome(Scenario())[name]
    assert_same(with_horovod[name], expected)


@pytest.mark.parametrize("name", [name for name, feature in FEATURES.items() if feature.like])
def test_a_feature_that_changes_no_number_changes_none(name: str, outcome: Any) -> None:
    like = FEATURES[name].like
    (expected,) = outcome(Scenario())[like]
    assert_same(outcome(Scenario())[name], expected)
