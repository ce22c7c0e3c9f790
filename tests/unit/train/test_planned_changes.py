"""Tests that a planned change of the workers of a sharded model costs no step, and moves only what the new ranks lack."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from features import numbers_of, origins_of
from group_kit import SCRIPTS, Workers
from night import at_night

from undula.elastic.pure.ranks import order_by_state


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Numbers of the run on one worker, without a change."""
    folder = tmp_path_factory.mktemp("expected")
    job = SCRIPTS["wide"].job(folder)
    with Workers(folder) as workers:
        (end,) = workers.train([workers.start()], "wide", job)
    assert end is not None
    assert end.how == "ended"
    return numbers_of(job)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with Workers(tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("before", "leaving", "joining", "part"),
    [
        *at_night([(1, [], 1, 1 / 2), (3, [1], 0, 1 / 3), (3, [2], 0, 1 / 2), (2, [0], 0, 1 / 2)]),
        (2, [], 1, 1 / 3),
        (3, [0], 0, 1 / 2),
        (2, [0, 1], 2, 1.0),
    ],
)
def test_only_what_the_new_ranks_lack_moves(
    before: int,
    leaving: list[int],
    joining: int,
    part: float,
    workers: Workers,
    tmp_path: Path,
    expected: dict[str, list[object]],
) -> None:
    job = SCRIPTS["wide"].job(tmp_path / "job")
    members = [workers.start() for _ in range(before)]
    ends = workers.train(members, "wide", job, leaves_after=4)
    assert [end.how for end in ends if end] == ["left"] * before
    staying = [rank for rank in range(before) if rank not in leaving]
    places = [*((rank, before) for rank in staying), *[None] * joining]
    candidates = [*(members[rank] for rank in staying), *(workers.start() for _ in range(joining))]
    group = [candidates[number] for number in order_by_state(places)]
    states = tuple(ends[rank].state for rank in leaving)  # type: ignore[union-attr]
    after = workers.train(group, "wide", job, leavers=states)
    assert [end and end.how for end in after] == ["ended"] * len(group)
    assert numbers_of(job) == expected
    assert origins_of(job) == [None, "the memory of a worker"]
    received, lacked = (sum(getattr(end, name) for end in after if end) for name in ("received", "lacked"))
    assert received <= 1.05 * lacked
    state = 3 * 4 * sum(parameter.numel() for parameter in SCRIPTS["wide"].train.make().parameters())  # type: ignore[attr-defined]
    assert lacked == pytest.approx(part * state, rel=0.02)
