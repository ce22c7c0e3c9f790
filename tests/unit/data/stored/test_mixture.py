"""Tests of mixed data sets: a mix is a function of the position, and each data set is consumed completely before it repeats."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from data_sets import write_table
from hypothesis import given, settings
from hypothesis import strategies as st

from undula.data import stream
from undula.data.stored.mixture import Mixture
from undula.errors import ManifestError, SpecError
from undula.plan.plan import PlanSpec

ROWS = {"web": 211, "code": 97, "books": 53}
WEIGHTS = {"web": 5.0, "code": 3.0, "books": 2.0}
FIRST_IDS = dict(zip(ROWS, itertools.accumulate(ROWS.values(), initial=0), strict=False))
PLAN = PlanSpec(global_batch=24, virtual_workers=6, window=2, epochs=4)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Write three data sets and return their weights by URL. The value of a sample is its id in the mix."""
    folder = tmp_path_factory.mktemp("mix")
    for name, rows in ROWS.items():
        columns = {"value": np.arange(rows) + FIRST_IDS[name], "name": [name] * rows}
        write_table(folder / name, columns, num_shards=2, row_group_bytes=7 * 16)
    return {str(folder / name): weight for name, weight in WEIGHTS.items()}


def steps(urls: dict[str, float], plan: PlanSpec, world_size: int, start: int, stop: int) -> list[list[int]]:
    ranks = [stream(urls, plan, rank=rank, world_size=world_size) for rank in range(world_size)]
    for each in ranks:
        each.load_state_dict({**each.state_dict(), "step": start})
    found = []
    for _ in zip(range(stop - start), zip(*ranks, strict=True), strict=False):
        found.append([int(row) for each in ranks for row in each.ids])
    return found


@pytest.fixture(scope="module")
def alone(urls: dict[str, float]) -> list[list[int]]:
    return steps(urls, PLAN, 1, 0, 1000)


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_resumes_at_any_world_sizes_do_not_change_the_mix(
    urls: dict[str, float], alone: list[list[int]], data: st.DataObject
) -> None:
    stops = sorted({*data.draw(st.lists(st.integers(0, len(alone)), min_size=5, max_size=8)), len(alone)})
    seen: list[list[int]] = []
    for stop in stops:
        seen += steps(urls, PLAN, data.draw(st.integers(1, 6)), len(seen), stop)
    assert seen == alone


def test_each_pass_over_a_data_set_takes_every_sample_once(urls: dict[str, float], alone: list[list[int]]) -> None:
    assert len(alone) == 4 * -(-sum(ROWS.values()) // PLAN.global_batch)
    ranks = [stream(urls, PLAN, rank=rank, world_size=6) for rank in range(6)]
    of_worker = [[int(row) for _ in each for row in each.ids] for each in ranks]
    for name, rows in ROWS.items():
        own = [[row - FIRST_IDS[name] for row in taken if 0 <= row - FIRST_IDS[name] < rows] for taken in of_worker]
        lengths = [rows // 6 + (virtual_worker < rows % 6) for virtual_worker in range(6)]
        whole = min(len(taken) // length for taken, length in zip(own, lengths, strict=True))
        assert whole >= 3
        for number in range(whole):
            parts = [taken[number * n : (number + 1) * n] for taken, n in zip(own, lengths, strict=True)]
            assert sorted(itertools.chain(*parts)) == list(range(rows))


def test_every_step_mixes_the_data_sets_in_proportion(alone: list[list[int]]) -> None:
    for step in alone[:14]:
        shares = Counter("web" if row < 211 else "code" if row < 308 else "books" for row in step)
        assert 6 <= shares["web"] <= 18
    web = sum(row < 211 for step in alone for row in step) / sum(map(len, alone))
    assert abs(web - 0.5) < 0.02


def test_samples_keep_their_columns_and_ids(urls: dict[str, float]) -> None:
    source = stream(urls, PLAN)
    batch = next(iter(source))
    assert batch["value"].tolist() == source.ids.tolist()
    assert batch["name"] == ["web" if row < 211 else "code" if row < 308 else "books" for row in source.ids]


def test_a_position_from_other_weights_is_refused(urls: dict[str, float]) -> None:
    state = stream(urls, PLAN).state_dict()
    with pytest.raises(ManifestError, match="saved with another plan or other data"):
        stream(dict.fromkeys(urls, 1.0), PLAN).load_state_dict(state)


def test_data_sets_with_different_columns_are_refused_by_name(tmp_path: Path) -> None:
    one = write_table(tmp_path / "one", {"x": [1, 2], "y": [1, 2]})
    other = write_table(tmp_path / "other", {"x": [1, 2], "y": ["a", "b"]})
    mixture = Mixture((one, other), (1.0, 1.0))
    with pytest.raises(
        ManifestError, match=r"/other has other columns than .*/one: column 'y' is string and not int64;"
    ):
        mixture.select(None)
    assert [column.name for column in mixture.select(["x"])] == ["x"]


def test_a_data_set_too_small_for_the_plan_is_refused_by_name(tmp_path: Path) -> None:
    large = write_table(tmp_path / "large", {"x": np.arange(100)})
    small = write_table(tmp_path / "small", {"x": [1, 2]})
    with pytest.raises(SpecError, match=r"data\.mix: .*small: plan.virtual_workers is 4, more than the 2 samples"):
        Mixture((large, small), (1.0, 1.0)).check_plan(PlanSpec(global_batch=8, virtual_workers=4))
