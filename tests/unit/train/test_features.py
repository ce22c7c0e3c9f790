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

    @property
    def rows(self) -> list[str]:
        """Names of the rows; torch's fully_shard does not work with another default device."""
        return [
            name for name in FEATURES if self.default_device is None or ("shard" not in name and "gathers" not in name)
        ]

    @property
    def origins(self) -> list[Origin | None]:
        """Places from which the groups have the state."""
        groups = [group for _, groups in self.parts for group in groups]
        return [None, *(group.origin for group in groups[:-1])]

    @property
    def is_on_one_rank(self) -> bool:
        return all(world_size == 1 for world_size, _ in self.parts)


INTERRUPTED = ((1, (Group(1), Group(3, "the checkpoint"), Group(5, "the memory of a node"), Group())),)
SCENARIOS = {
    "interrupted": Scenario(INTERRUPTED, reads_ahead=True),
    "interrupted, with another default device": Scenario(INTERRUPTED, default_device="meta"),
    "on two ranks, with another default device": Scenario(((2, (Group(),)),), default_device="meta"),
    "on three ranks, and from their checkpoint on two": Scenario(((3, (Group(3, "the checkpoint"),)), (2, (Group(),)))),
    "on three ranks, and from their memory on two": Scenario(
        ((3, (Group(5, "the memory of a node"),)), (2, (Group(),))), reads_ahead=True
    ),
}
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


@pytest.mark.parametrize(("scenario", "name"), [(key, name) for key, of in SCENARIOS.items() for name in of.rows])
def test_a_feature_has_the_same_numbers_wherever_it_trains(scenario: str, name: str, outcome: Any) -> None:
    (expected,) = outcome(Scenario())[name]
    assert_same(outcome(SCENARIOS[scenario])[name], expected)


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
