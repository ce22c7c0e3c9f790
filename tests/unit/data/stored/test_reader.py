"""Tests of a rank's reader in this process: it has the plan's samples from any step on, after any resumes at any world sizes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from data_sets import write_table
from hypothesis import given, settings
from hypothesis import strategies as st

from undula.data.reader import SampleReader, Samples
from undula.data.spec import DataSpec
from undula.data.stored.manifest import Manifest
from undula.data.stored.reader import stored_reader
from undula.data.stored.reads import WindowRead, WindowReads
from undula.data.stored.shards import Shard
from undula.data.stored.windows import HEAD_WINDOWS
from undula.plan.order import EpochOrder
from undula.plan.plan import Plan, PlanSpec
from undula.plan.tree import assign
from undula.storage import Store

NUM_ROWS = 331


def numbers(where: Path | Store, rows: int, num_shards: int = 1, row_group_rows: int = 10**6) -> Manifest:
    return write_table(where, {"value": np.arange(1000, 1000 + rows)}, num_shards, row_group_rows * 8)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return numbers(tmp_path_factory.mktemp("reader"), NUM_ROWS, num_shards=5, row_group_rows=7)


def samples_of_step(readers: list[SampleReader], plan: Plan, step: int) -> Samples:
    """Take a step's samples from the readers of all ranks, ordered by rank."""
    taken = []
    for reader, virtual_workers in zip(readers, assign(plan.spec.virtual_workers, len(readers)), strict=True):
        for work in plan.work(range(step, step + 1), virtual_workers):
            taken.append(reader.take(work.virtual_worker, work.samples))
    ids = np.concatenate([part.ids for part in taken])
    values = [value for part in taken for value in part.batch["value"].tolist()]
    assert values == (ids + 1000).tolist()
    return Samples(ids, {})


def readers_from(manifest: Manifest, plan: Plan, world_size: int, start: int = 0) -> list[SampleReader]:
    spec = DataSpec(train=manifest.url)
    ranks = assign(plan.spec.virtual_workers, world_size)
    return [stored_reader(manifest, plan, virtual_workers, spec, start) for virtual_workers in ranks]


def uninterrupted(manifest: Manifest, plan: Plan) -> Iterator[list[int]]:
    for epoch in range(plan.spec.epochs):
        order = EpochOrder(plan, manifest.row_counts, epoch)
        for step in range(plan.steps_per_epoch):
            yield order.step_ids(step).tolist()


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    virtual_workers = draw(st.integers(1, 8))
    spec = PlanSpec(
        global_batch=virtual_workers * draw(st.integers(1, 9)),
        virtual_workers=virtual_workers,
        micro_batch=draw(st.none() | st.integers(1, 4)),
        epochs=2,
        seed=draw(st.integers(0, 99)),
        shuffle=draw(st.sampled_from(["none", "row_groups", "window"])),
        window=draw(st.integers(1, 5)),
        last_step=draw(st.sampled_from(["short", "drop", "wrap"])),
    )
    return Plan(spec, NUM_ROWS)


@settings(max_examples=20, deadline=None)
@given(plan=plans(), data=st.data())
def test_resumes_at_any_world_sizes_do_not_change_the_samples(
    manifest: Manifest, plan: Plan, data: st.DataObject
) -> None:
    stops = data.draw(st.lists(st.integers(0, plan.total_steps), min_size=5, max_size=8), label="stops")
    # The last step and the end of an epoch are the most error-prone places.
    stops = sorted({*stops, plan.steps_per_epoch - 1, plan.steps_per_epoch, plan.total_steps})
    seen: list[list[int]] = []
    for stop in stops:
        world_size = data.draw(st.integers(1, plan.spec.virtual_workers), label="world size")
        readers = readers_from(manifest, plan, world_size, start=len(seen))
        seen += [samples_of_step(readers, plan, step).ids.tolist() for step in range(len(seen), stop)]
        for reader in readers:
            reader.close()
    assert seen == list(uninterrupted(manifest, plan))
    if plan.spec.last_step == "short":
        for epoch in range(2):
            steps = seen[epoch * plan.steps_per_epoch : (epoch + 1) * plan.steps_per_epoch]
            assert sorted(row for step in steps for row in step) == list(range(NUM_ROWS))


@pytest.mark.parametrize("shuffle", ["none", "row_groups", "window"])
def test_a_rank_without_samples_gets_as_many_rows_as_it_asks_for(folder: Store, shuffle: str) -> None:
    """BatchNorm cannot train on one row, and the first window of a stream can have a single one."""
    columns = {"value": np.arange(9), "name": [f"row {row}" for row in range(9)]}
    manifest = write_table(folder, columns, row_group_bytes=1)
    plan = Plan(PlanSpec(global_batch=9, virtual_workers=3, shuffle=shuffle, window=1), 9)
    reader = stored_reader(manifest, plan, range(2, 3), DataSpec(train=manifest.url))
    for count in (2, 0, 3):
        samples = reader.any_rows(count)
        assert len(samples.ids) == len(samples.batch["value"]) == count
        assert samples.batch["name"] == [f"row {row}" for row in samples.ids]


@pytest.mark.parametrize(
    ("world_size", "row_group_rows", "shuffle", "decodes"),
    [(1, 130, "none", 5), (1, 130, "row_groups", 5), (1, 130, "window", 5), (3, 640, "window", 3)],
)
def test_a_rank_decodes_a_row_group_that_its_virtual_workers_share_once(
    folder: Store, monkeypatch: pytest.MonkeyPatch, world_size: int, row_group_rows: int, shuffle: str, decodes: int
) -> None:
    manifest = numbers(folder, 640, row_group_rows=row_group_rows)
    plan = Plan(PlanSpec(global_batch=64, virtual_workers=64, epochs=2, shuffle=shuffle), 640)
    decoded = []
    row_group = Shard.row_group

    def counting(shard: Shard, number: int, columns: Sequence[str]) -> pa.Table:
        decoded.append(number)
        return row_group(shard, number, columns)

    monkeypatch.setattr(Shard, "row_group", counting)
    readers = readers_from(manifest, plan, world_size)
    seen = [samples_of_step(readers, plan, step).ids.tolist() for step in range(plan.total_steps)]
    for reader in readers:
        reader.close()
    assert seen == list(uninterrupted(manifest, plan))
    assert len(decoded) == plan.spec.epochs * decodes


def test_two_ranks_share_a_row_group_only_at_the_cut_between_them(manifest: Manifest) -> None:
    plan = Plan(PlanSpec(global_batch=12, virtual_workers=6), NUM_ROWS)
    order = EpochOrder(plan, manifest.row_counts, 0)
    of_rank = [
        {rows.row_group for v in rank for window in order.windows(v) for rows in window.ranges} for rank in assign(6, 3)
    ]
    assert set.union(*of_rank) == set(range(len(manifest.row_counts)))
    shared = [of_rank[one] & of_rank[other] for one in range(3) for other in range(one)]
    assert sum(len(groups) for groups in shared) <= 2


def test_the_first_samples_of_tiny_files_do_not_wait_for_a_list_of_all_windows(
    folder: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = numbers(folder, 400, row_group_rows=1)
    plan = Plan(PlanSpec(global_batch=4, virtual_workers=2, epochs=1000, window=1), 400)
    listed, read_of = [], WindowReads.of

    def counted(*arguments: Any) -> WindowRead:
        listed.append(arguments)
        return read_of(*arguments)

    monkeypatch.setattr(WindowReads, "of", counted)
    (reader,) = readers_from(manifest, plan, world_size=1)
    assert samples_of_step([reader], plan, 0).ids.tolist() == next(uninterrupted(manifest, plan))
    reader.close()
    assert len(listed) <= HEAD_WINDOWS + 1
