"""Tests of the memory of batches: each tensor has its own and begins at a multiple of 64 bytes, whatever the rank and the position.

The kernel that torch chooses, and so the last bits of a result, can depend on the alignment of its arguments.
"""

import itertools

import numpy as np
import pyarrow as pa
import pytest
import torch
from data_sets import write_table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from undula.data.planned import Data
from undula.data.prepare.write import array_column, array_field
from undula.data.reader import Samples
from undula.data.spec import DataSpec
from undula.data.stored.manifest import Manifest
from undula.data.stored.maps import Sample
from undula.data.stored.mixture import Mixture
from undula.data.stored.reader import stored_reader
from undula.plan.plan import Plan, PlanSpec
from undula.plan.tree import assign

NUM_ROWS = 83
COLUMNS = {
    "floats": pa.array(np.arange(NUM_ROWS, dtype=np.float32)),
    "halves": pa.array(np.arange(NUM_ROWS, dtype=np.float16)),
    "flags": pa.array([row % 3 == 0 for row in range(NUM_ROWS)]),
    "large": pa.array(np.arange(NUM_ROWS, dtype=np.uint64) + 2**63),
    "pixels": array_column(
        array_field("pixels", pa.uint8(), (3, 1)), np.arange(3 * NUM_ROWS, dtype=np.uint8).reshape(-1, 3, 1)
    ),
}
ROWS = {name: values.to_numpy(zero_copy_only=False) for name, values in COLUMNS.items() if name != "pixels"} | {
    "pixels": np.arange(3 * NUM_ROWS, dtype=np.uint8).reshape(-1, 3, 1)
}


@pytest.fixture(scope="module", params=["one data set", "a mix"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Data:
    manifests = tuple(written(str(tmp_path_factory.mktemp("rows"))) for _ in range(2))
    return manifests[0] if request.param == "one data set" else Mixture(manifests, (2.0, 1.0))


def written(folder: str) -> Manifest:
    """Write a data set with row groups of about 7 rows."""
    fields = [array_field(n, pa.uint8(), (3, 1)) if n == "pixels" else pa.field(n, c.type) for n, c in COLUMNS.items()]
    table = pa.Table.from_arrays(list(COLUMNS.values()), schema=pa.schema(fields))
    return write_table(folder, table, num_shards=3, row_group_bytes=7 * 18)


def same(sample: Sample, rng: np.random.Generator) -> Sample:
    return sample


def check(samples: Samples) -> None:
    for name, values in samples.batch.items():
        assert isinstance(values, Tensor)
        assert values.tolist() == ROWS[name][samples.ids % NUM_ROWS].tolist()
        assert values.is_contiguous()
        assert values.data_ptr() % 64 == 0
        assert values.untyped_storage().nbytes() == values.nbytes  # it is no view of other rows


@settings(max_examples=25, deadline=None)
@given(
    virtual_workers=st.integers(1, 5),
    share=st.integers(1, 9),
    micro_batch=st.none() | st.integers(1, 4),
    shuffle=st.sampled_from(["none", "row_groups", "window"]),
    is_mapped=st.booleans(),
    draw=st.data(),
)
def test_every_tensor_of_every_batch_is_aligned(
    data: Data,
    virtual_workers: int,
    share: int,
    micro_batch: int | None,
    shuffle: str,
    is_mapped: bool,
    draw: st.DataObject,
) -> None:
    spec = PlanSpec(
        global_batch=virtual_workers * share,
        virtual_workers=virtual_workers,
        micro_batch=micro_batch,
        shuffle=shuffle,
        window=2,
    )
    plan = Plan(spec, data.num_rows)
    world_size = draw.draw(st.integers(1, virtual_workers), label="world size")
    own = assign(virtual_workers, world_size)[draw.draw(st.integers(0, world_size - 1), label="rank")]
    start = draw.draw(st.integers(0, plan.total_steps - 1), label="start")
    stream = stored_reader(data, plan, own, DataSpec(train="unused"), start, same if is_mapped else None)
    for each in itertools.islice(plan.work(range(start, plan.total_steps), own), 12):
        check(stream.take(each.virtual_worker, each.samples))
    check(stream.any_rows(2))
    stream.close()


def test_a_script_may_change_its_batch(data: Data) -> None:
    """Rows that no shuffle copies are still in the memory from which other batches are taken."""
    plan = Plan(PlanSpec(global_batch=4, virtual_workers=1, shuffle="none"), data.num_rows)
    stream = stored_reader(data, plan, range(1), DataSpec(train="unused"))
    for _ in range(2):
        samples = stream.any_rows(2)
        check(samples)
        for values in samples.batch.values():
            assert isinstance(values, Tensor)
            values.copy_(torch.zeros_like(values))
    stream.close()
