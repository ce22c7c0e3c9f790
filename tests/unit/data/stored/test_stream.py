"""Tests of the stand-alone stream: batches of a rank, maps keyed by sample, and positions that can be loaded at any world size."""

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from data_sets import write_table

from undula.data import Manifest, Stream, stream
from undula.data.prepare.write import array_column, array_field
from undula.errors import ManifestError, UsageError
from undula.plan.plan import PlanSpec

NUM_ROWS = 100
PLAN = PlanSpec(global_batch=16, virtual_workers=4, epochs=2)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    field = array_field("pair", pa.float32(), (2,))
    schema = pa.schema(
        [field, ("name", pa.string()), ("raw", pa.binary()), ("small", pa.int16()), ("flag", pa.bool_())]
    )
    pairs = np.stack([np.arange(NUM_ROWS), -np.arange(NUM_ROWS)], axis=1).astype(np.float32)
    names = [f"row {row}" for row in range(NUM_ROWS)]
    small, flags = np.arange(NUM_ROWS, dtype=np.int16), np.arange(NUM_ROWS) % 3 == 0
    columns = [array_column(field, pairs), names, [name.encode() for name in names], small, flags]
    table = pa.Table.from_arrays([pa.array(values) for values in columns], schema=schema)
    return write_table(tmp_path_factory.mktemp("stream"), table, num_shards=2, row_group_bytes=200)


def global_steps(streams: list[Stream], most: int = 1000) -> list[list[int]]:
    """Return the ids of each step, ordered by rank."""
    ids = []
    for _ in zip(range(most), zip(*streams, strict=True), strict=False):
        ids.append([int(row) for each in streams for row in each.ids])
    return ids


def test_a_position_can_be_loaded_at_another_world_size(manifest: Manifest) -> None:
    alone = global_steps([stream(manifest, PLAN)])
    assert len(alone) == 2 * 7
    assert sorted(row for step in alone[:7] for row in step) == list(range(NUM_ROWS))
    two = [stream(manifest, PLAN, rank=rank, world_size=2) for rank in range(2)]
    begun = global_steps(two, most=9)
    states = [each.state_dict() for each in two]
    assert states[0] == states[1]
    three = [stream(manifest, PLAN, rank=rank, world_size=3) for rank in range(3)]
    for each in three:
        each.load_state_dict(states[0])
    assert len(three[0]) == len(alone) - 9
    assert begun + global_steps(three) == alone


def test_a_position_of_another_plan_is_refused(manifest: Manifest) -> None:
    state = stream(manifest, PLAN).state_dict()
    with pytest.raises(ManifestError, match="saved with another plan or other data"):
        stream(manifest, PlanSpec(global_batch=20, virtual_workers=4)).load_state_dict(state)


def test_a_rank_without_virtual_workers_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match="rank 4 of 5 has none of the 4 virtual workers"):
        stream(manifest, PLAN, rank=4, world_size=5)


def test_a_rank_without_a_share_in_a_short_step_gets_an_empty_batch(tmp_path: Path) -> None:
    manifest = write_table(tmp_path, {"x": np.arange(98.0), "name": ["n"] * 98})
    plan = PlanSpec(global_batch=16, virtual_workers=4)  # the last step has two samples
    *_, last = stream(manifest, plan, rank=1, world_size=2)
    assert last["x"].shape == (0,)
    assert last["name"] == []
    *_, last = stream(manifest, plan, rank=0, world_size=2)
    assert last["x"].shape == (2,)


def test_columns_become_tensors_strings_and_bytes(manifest: Manifest) -> None:
    source = stream(manifest.url, PLAN, columns=("pair", "name", "raw", "small", "flag"))
    batch = next(iter(source))
    assert torch.equal(batch["small"], torch.tensor(source.ids, dtype=torch.int16))
    assert torch.equal(batch["flag"], torch.tensor(source.ids % 3 == 0))
    assert torch.equal(batch["pair"], torch.tensor([[row, -row] for row in source.ids], dtype=torch.float32))
    assert batch["name"] == [f"row {row}" for row in source.ids]
    assert batch["raw"] == [f"row {row}".encode() for row in source.ids]


def noisy(sample: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Decode the bytes and add noise, as a map of images does."""
    number = int(io.BytesIO(sample["raw"]).read().decode().split()[1])
    return {"image": np.full((2, 3), number, np.float32) + rng.normal(size=(2, 3)).astype(np.float32), "n": number}


def augmented(manifest: Manifest, world_size: int) -> dict[tuple[int, int], torch.Tensor]:
    """Return the result of the map by epoch and sample id."""
    found = {}
    for rank in range(world_size):
        source = stream(manifest, PLAN, rank=rank, world_size=world_size, map=noisy)
        for place, batch in enumerate(source):
            assert batch["n"].tolist() == source.ids.tolist()
            found |= {(place // 7, int(row)): image for row, image in zip(source.ids, batch["image"], strict=True)}
    return found


def test_augmentation_is_the_same_at_any_world_size_and_differs_between_epochs(manifest: Manifest) -> None:
    one, three = augmented(manifest, 1), augmented(manifest, 3)
    assert one.keys() == three.keys()
    assert all(torch.equal(one[key], three[key]) for key in one)
    assert one[0, 5].shape == (2, 3)
    assert abs(float(one[0, 5].mean()) - 5) < 3
    assert not torch.equal(one[0, 5], one[1, 5])


def test_a_map_does_not_change_bytes(tmp_path: Path) -> None:
    raw = [b"ab\0", b"c", b"", b"\0\0d"]
    manifest = write_table(tmp_path, {"raw": raw})
    plan = PlanSpec(global_batch=4, virtual_workers=1, shuffle="none")
    assert next(iter(stream(manifest, plan, map=lambda sample, rng: sample)))["raw"] == raw


def test_a_column_of_an_unsupported_type_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:
    manifest = write_table(tmp_path, {"when": pa.array([0, 1], pa.timestamp("us")), "x": [1, 2]})
    with pytest.raises(ManifestError, match=r"column 'when' of .* has type timestamp\[us\]"):
        next(iter(stream(manifest, PlanSpec(global_batch=2, virtual_workers=1))))
    plan = PlanSpec(global_batch=2, virtual_workers=1, shuffle="none")
    assert next(iter(stream(manifest, plan, columns=("x",))))["x"].tolist() == [1, 2]


def test_an_iteration_goes_on_from_a_position_that_is_loaded_meanwhile(manifest: Manifest) -> None:
    expected = global_steps([stream(manifest, PLAN)])
    for rank, world_size in ((0, 1), (1, 2)):
        source = stream(manifest, PLAN, rank=rank, world_size=world_size)
        shares = [source.ids.tolist() for _ in source]
        batches = iter(source)
        found = []
        states = [source.state_dict()]
        for jump in (None, None, 0, None, 9, 3, 3, None, 13, 7):  # the step to load before the batch
            if jump is not None:
                source.load_state_dict({**states[0], "step": jump})
            step = source.step
            assert len(source) == len(expected) - step
            batch = next(batches)
            assert batch["name"] == [f"row {row}" for row in shares[step]]
            assert source.state_dict()["step"] == step + 1
            found.append(source.ids.tolist() == shares[step])
        assert found == [True] * 10
        assert [source.ids.tolist() for _ in batches] == shares[8:]
        assert source.step == 0


def test_a_position_at_the_end_of_the_plan_ends_the_iteration(manifest: Manifest) -> None:
    source = stream(manifest, PLAN)
    states = [source.state_dict() for _ in source]
    batches = iter(source)
    next(batches)
    source.load_state_dict(states[-1])
    assert not list(batches)
    assert source.step == 0


def test_a_state_taken_within_a_batch_continues_after_it(manifest: Manifest) -> None:
    source = stream(manifest, PLAN)
    taken = [(source.ids.tolist(), source.state_dict()) for _ in source]
    other = stream(manifest, PLAN)
    for place in (0, 5, 6, 12):  # in the middle of an epoch, at its end, and at the step before the last
        other.load_state_dict(taken[place][1])
        next(iter(other))
        assert other.ids.tolist() == taken[place + 1][0]


def test_an_iterator_that_another_one_replaced_is_refused(manifest: Manifest) -> None:
    source = stream(manifest, PLAN)
    one, other = iter(source), iter(source)
    found = [next(one)["name"], next(other)["name"]]
    with pytest.raises(UsageError, match="continued after another one had begun"):
        next(one)
    found += [batch["name"] for batch in other]
    assert found == [batch["name"] for batch in stream(manifest, PLAN)]


def test_an_iteration_can_be_left_and_continued(manifest: Manifest) -> None:
    source = stream(manifest, PLAN)
    found = []
    for size in (2, 1, 100):
        for _ in itertools.islice(source, size):
            found.append(source.ids.tolist())
    assert found == global_steps([stream(manifest, PLAN)])
