"""Tests that a rank of a sharded model, killed anywhere in a step, costs no step, and that the run keeps the bits of an unsharded one."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from features import numbers_of, origins_of
from group_kit import SCRIPTS, Fault, Place, Workers
from night import at_night

from undula.parallel.spec import ShardingSpec
from undula.plan.tree import UPDATES
from undula.recovery.snapshot import folder_of
from undula.state.events import LogEvent, StartEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store
from undula.train.job import Job

STAGE_3 = ["plain, sharded in stage 3", "fp16 and lamb"]
"""The second one needs other ranks for its norms, and skips steps."""
CHANGED = ["decayed", "decayed in after_step"]
"""Scripts that change weights between two steps, which no record has."""
NOT_CHANGED = "not changed"
"""Script that changes no weights there, and whose ranks do not meet between two steps."""
AVERAGED = "averaged"
"""Script whose steps have a part with state of its own, an average of the shards."""
SUMMED = ["summed", "summed, sharded"]
"""Scripts whose steps have a part with state of each virtual worker."""
COMMITS_NOWHERE: list[Place] = ["before the reduction", "between reduction and commit", "inside the commit"]
COMMITS: list[Place] = ["after its commit", "in the optimizer's step", "after the optimizer's step"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Any]]]:
    """Numbers of each row, trained unsharded on one rank."""
    folder = tmp_path_factory.mktemp("expected")
    numbers = {}
    with Workers(folder) as workers:
        worker = workers.start()
        for place, name in enumerate((*STAGE_3, *CHANGED, NOT_CHANGED, AVERAGED, *SUMMED)):
            whole = replace(SCRIPTS[name].job(folder / str(place)), sharding=ShardingSpec())
            (end,) = workers.train([worker], name, whole)
            assert end is not None
            assert end.how == "ended"
            numbers[name] = {**numbers_of(whole), **sums_of(whole)}
    return numbers


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with Workers(tmp_path) as made:
        yield made


def starts_of(job: Job) -> list[int]:
    return [event.step for event in events_of(read_ledger(Store(job.run_url)).events, StartEvent)]


def sums_of(job: Job) -> dict[str, list[Any]]:
    """Return what a script has logged after the last step, if it has."""
    logs = events_of(read_ledger(Store(job.run_url)).events, LogEvent)
    return {"sum": [log.values["sum"] for log in logs]} if logs else {}


def once(numbers: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the numbers of each step without those of its validation, which is done again with a step that is repeated."""
    return {name: values for name, values in numbers.items() if not name.startswith(("validation.", "logged.before"))}


def without(numbers: dict[str, list[Any]], key: str) -> dict[str, list[Any]]:
    return {name: values for name, values in numbers.items() if name != key}


@pytest.mark.parametrize("name", STAGE_3)
@pytest.mark.parametrize(
    ("fault", "start"),
    [
        *[pytest.param(Fault(place, rank=1, step=5), 5, id=place) for place in COMMITS_NOWHERE],
        *[pytest.param(Fault(place, rank=1, step=5), 6, id=place) for place in COMMITS],
        pytest.param(Fault("after its commit", rank=1, step=5, deaf=(2,)), 6, id="one survivor has the commit"),
        pytest.param(
            Fault("after its commit", rank=1, step=5, deaf=(0, 2)), 5, id="only the killed rank has the commit"
        ),
    ],
)
def test_a_rank_that_is_killed_costs_no_step(
    name: str, fault: Fault, start: int, workers: Workers, tmp_path: Path, expected: dict[str, Any]
) -> None:
    job = SCRIPTS[name].job(tmp_path / "job")
    members = [workers.start() for _ in range(3)]
    ends = workers.train(members, name, job, fault=fault)
    assert [end and end.how for end in ends] == ["broken", None, "broken"]
    assert max(end.committed for end in ends if end) == start
    ends = workers.train([members[0], members[2]], name, job)  # the node of the killed rank lives on
    assert [end and end.how for end in ends] == ["ended", "ended"]
    assert starts_of(job) == [0, start]
    # The work of the script after the commit may not have ended, and this script does not repeat it.
    assert without(numbers_of(job), "logged.before") == without(expected[name], "logged.before")
    assert origins_of(job)[1] == "the memory of a worker and the memory of a node"


@pytest.mark.parametrize(
    ("place", "most"), [*((place, 0) for place in COMMITS_NOWHERE), *((place, UPDATES) for place in COMMITS)]
)
def test_only_a_rank_that_is_killed_between_a_commit_and_the_next_step_costs_steps(
    place: Place, most: int, workers: Workers, tmp_path: Path, expected: dict[str, Any]
) -> None:
    job = SCRIPTS[NOT_CHANGED].job(tmp_path / "job")
    members = [workers.start() for _ in range(3)]
    ends = workers.train(members, NOT_CHANGED, job, fault=Fault(place, rank=1, step=7), every=UPDATES)
    committed = max(end.committed for end in ends if end)
    workers.train([members[0], members[2]], NOT_CHANGED, job, every=UPDATES)
    assert committed - most <= starts_of(job)[-1] <= committed
    assert numbers_of(job) == expected[NOT_CHANGED]


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("every", [*at_night([None]), 1])
@pytest.mark.parametrize("place", ["before the reduction", "inside the commit", "after its commit"])
def test_what_a_script_changes_between_steps_is_not_lost_with_a_rank(
    name: str, place: Place, every: int | None, workers: Workers, tmp_path: Path, expected: dict[str, Any]
) -> None:
    job = SCRIPTS[name].job(tmp_path / "job")
    members = [workers.start() for _ in range(3)]
    ends = workers.train(members, name, job, fault=Fault(place, rank=1, step=6), every=every)
    assert [end and end.how for end in ends] == ["broken", None, "broken"]
    workers.train([members[0], members[2]], name, job, every=every)
    assert numbers_of(job) == expected[name]


@pytest.mark.parametrize("every", [*at_night([1]), 4])
@pytest.mark.parametrize("place", [*COMMITS_NOWHERE, *COMMITS])
def test_the_state_of_a_part_is_of_one_moment_with_the_weights(
    place: Place, every: int, workers: Workers, tmp_path: Path, expected: dict[str, Any]
) -> None:
    job = SCRIPTS[AVERAGED].job(tmp_path / "job")
    members = [workers.start() for _ in range(3)]
    ends = workers.train(members, AVERAGED, job, fault=Fault(place, rank=1, step=6), every=every)
    assert [end and end.how for end in ends] == ["broken", None, "broken"]
    workers.train([members[0], members[2]], AVERAGED, job, every=every)
    assert once({**numbers_of(job), **sums_of(job)}) == once(expected[AVERAGED])


@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize(
    "place", [*at_night([*COMMITS_NOWHERE[:2], *COMMITS[1:]]), "inside the commit", "after its commit"]
)
def test_what_belongs_to_the_virtual_workers_of_a_killed_rank_is_of_one_moment_with_the_weights(
    name: str, place: Place, workers: Workers, tmp_path: Path, expected: dict[str, Any]
) -> None:
    job = SCRIPTS[name].job(tmp_path / "job")
    members = [workers.start() for _ in range(3)]
    ends = workers.train(members, name, job, fault=Fault(place, rank=1, step=6), every=4)
    assert [end and end.how for end in ends] == ["broken", None, "broken"]
    workers.train([members[0], members[2]], name, job, every=4)
    assert once(numbers_of(job)) == once(expected[name])


@pytest.mark.parametrize("name", ["summed", *at_night(["summed, sharded"])])
def test_a_rank_that_is_killed_in_the_first_step_of_a_group_costs_no_step_that_was_handed_over(
    name: str, workers: Workers, tmp_path: Path, expected: dict[str, Any]
) -> None:
    """The rows of a virtual worker came from a worker that has left, and whose node is gone."""
    job = SCRIPTS[name].job(tmp_path / "job")
    first, second, third = (workers.start() for _ in range(3))
    ends = workers.train([first, second], name, job, leaves_after=5, every=4)
    assert ends[1] is not None
    for folder in folder_of(job.run_url, job.run_id).glob("*/1"):
        shutil.rmtree(folder)
    fault = Fault("before the reduction", rank=1, step=0)
    workers.train([first, third], name, job, every=4, leavers=(ends[1].state,), fault=fault)
    workers.train([first, workers.start()], name, job, every=4)
    assert starts_of(job) == [0, 5, 5]
    assert once(numbers_of(job)) == once(expected[name])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "name",
    [
        "decayed after a gather, with state",
        *at_night(["decayed after a gather", "decayed after a gather in after_step"]),
    ],
)
def test_ranks_of_which_some_have_done_the_work_after_a_step_do_not_differ(
    name: str, stage: Any, workers: Workers, tmp_path: Path
) -> None:
    whole = replace(SCRIPTS[name].job(tmp_path / "whole"), sharding=ShardingSpec())
    job = replace(SCRIPTS[name].job(tmp_path / "job"), sharding=ShardingSpec(stage))
    workers.train([workers.start()], name, whole)
    members = [workers.start() for _ in range(3)]
    # Rank 1 is killed after the gathering, which rank 0 alone does not learn of. Rank 2 goes on and changes the weights.
    ends = workers.train(members, name, job, fault=Fault("after a gather", rank=1, step=5, deaf=(0,)), every=1)
    assert [end and end.how for end in ends] == ["broken", None, "broken"]
    ends = workers.train([members[0], members[2]], name, job, every=1)
    assert [end and end.how for end in ends] == ["ended", "ended"]
    assert numbers_of(job) == numbers_of(whole)
