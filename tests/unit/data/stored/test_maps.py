"""Tests of maps: what a batch has depends on the function and on the data, and not on which process reads which sample first."""

import pickle
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from data_sets import write_table
from ray.data._internal.arrow_ops.transform_pyarrow import concat

from undula.data import Manifest, stream
from undula.data.stored.maps import Sample, SampleFunction
from undula.data.stored.reads import WindowReads
from undula.data.stored.rows import WindowRows
from undula.data.stored.windows import StreamMap
from undula.errors import ManifestError, UndulaError, UsageError
from undula.plan.order import EpochOrder
from undula.plan.plan import Plan, PlanSpec

NUM_ROWS = 32
PLAN = PlanSpec(global_batch=4, virtual_workers=4, shuffle="none")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Write a data set whose only value is the sample's id, in row groups of 4 rows."""
    return numbers(tmp_path_factory.mktemp("maps"), NUM_ROWS)


def numbers(folder: Path, rows: int) -> Manifest:
    return write_table(folder, {"n": np.arange(rows)}, num_shards=2, row_group_bytes=4 * 8)


def returned(data: Any, function: SampleFunction, rank: int = 0, world_size: int = 1) -> list[Any]:
    """Return the batches of a rank, and last the error with which they end, if any."""
    found: list[Any] = []
    try:
        found += stream(data, PLAN, rank=rank, world_size=world_size, map=function)
    except UndulaError as error:
        found.append(error)
    return found


def late(first: object, other: object) -> SampleFunction:
    """Return a map that returns another value for the samples from 20 on, which are in other windows than sample 0."""
    return lambda sample, rng: {"x": first if sample["n"] < 20 else other}


def more_columns(sample: Sample, rng: np.random.Generator) -> Sample:
    return {"n": sample["n"]} if sample["n"] < 20 else {"n": sample["n"], "extra": 1}


def fewer_columns(sample: Sample, rng: np.random.Generator) -> Sample:
    return {"n": sample["n"], "extra": 1} if sample["n"] < 20 else {"n": sample["n"]}


CHANGES = {
    "another column": (more_columns, r"the columns \['n', 'extra'\] for sample \d+ of .*, but \['n'\] for the first"),
    "a column less": (fewer_columns, r"the columns \['n'\] for sample \d+ of .*, but \['n', 'extra'\] for the first"),
    "another precision": (late(np.float32(1), np.float64(1)), r"'x' as float64\[\] for sample \d+ of .* float32\[\]"),
    "an integer for a real number": (late(1.0, 1), r"'x' as int64\[\] for sample \d+ of .* float64\[\]"),
    "a NumPy integer for a Python integer": (late(1, np.int32(1)), r"'x' as int32\[\] for sample \d+ of .* int64\[\]"),
    "a large integer": (late(1, 2**63), r"'x' as uint64\[\] for sample \d+ of .* int64\[\]"),
    "a boolean for an integer": (late(1, True), r"'x' as bool\[\] for sample \d+ of .* int64\[\]"),
    "another shape": (late(np.zeros((2, 3)), np.zeros((3, 2))), r"'x' as float64\[3, 2\] for sample \d+ of .*\[2, 3\]"),
    "an array for a scalar": (late(1.0, np.zeros(1)), r"'x' as float64\[1\] for sample \d+ of .* float64\[\]"),
    "bytes for a str": (late("a", b"a"), r"'x' as bytes for sample \d+ of .* as str for the first sample"),
    "a number for a str": (late("a", 1), r"'x' as int64\[\] for sample \d+ of .* as str for the first sample"),
    "None for a number": (late(1, None), r"'x' as NoneType for sample \d+ of .*, which batches cannot hold"),
    "nothing": (lambda sample, rng: {"x": 1} if sample["n"] < 20 else None, r"returned NoneType for sample \d+ of"),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_map_that_returns_something_else_in_another_window_is_refused_at_any_world_size(
    manifest: Manifest, kind: str, world_size: int
) -> None:
    """Virtual workers 2 and 3 read samples from 16 on. At world size 4, the last rank reads nothing but samples from 24 on."""
    function, problem = CHANGES[kind]
    of_ranks = [returned(manifest, function, rank, world_size) for rank in range(world_size)]
    refused = [found[-1] for found in of_ranks if isinstance(found[-1], Exception)]
    assert len(refused) == (1 if world_size < 4 else 2)
    for error in refused:
        assert isinstance(error, UsageError)
        with pytest.raises(UsageError, match=problem):
            raise error


def test_the_columns_of_a_mix_are_those_of_its_first_row(tmp_path: Path) -> None:
    """The second data set is the larger one, and several ranks read from it first."""
    one, other = numbers(tmp_path / "one", 8), numbers(tmp_path / "other", 64)

    def by_size(sample: Sample, rng: np.random.Generator) -> Sample:
        return {"x": np.float32(1) if sample["n"] < 8 else np.float64(1)}

    for world_size in (1, 4):
        for rank in range(world_size):
            *_, last = returned({one.url: 1.0, other.url: 9.0}, by_size, rank, world_size)
            assert "'x' as float64[] for sample" in str(last)
            assert f"of {other.url}, but as float32[]" in str(last)


def test_the_order_of_the_columns_does_not_matter(manifest: Manifest) -> None:
    def in_turn(sample: Sample, rng: np.random.Generator) -> Sample:
        columns = {"n": sample["n"], "name": str(sample["n"])}
        return columns if sample["n"] % 2 == 0 else dict(reversed(columns.items()))

    batches = returned(manifest, in_turn)
    assert [list(batch) for batch in batches] == [["n", "name"]] * 8
    assert all(batch["name"] == [str(n) for n in batch["n"].tolist()] for batch in batches)


def memory_used_again() -> SampleFunction:
    memory = np.zeros((2, 2), np.int32)

    def fill(sample: Sample, rng: np.random.Generator) -> Sample:
        memory[:] = sample["n"]
        return {"x": memory}

    return fill


def full(shape: tuple[int, ...], dtype: str) -> SampleFunction:
    return lambda sample, rng: {"x": np.full(shape, sample["n"], dtype)}


def transposed(sample: Sample, rng: np.random.Generator) -> Sample:
    return {"x": (np.arange(6).reshape(2, 3) + sample["n"]).T[::-1]}


EXACT = {
    "Python integers": (lambda n: n - 2**62, torch.int64),
    "Python integers above 2**63": (lambda n: n + 2**63, torch.uint64),
    "Python real numbers": (lambda n: n / 3, torch.float64),
    "Python booleans": (lambda n: n % 3 == 0, torch.bool),
    "NumPy scalars": (lambda n: np.float16(n / 8), torch.float16),
    "NumPy booleans": (lambda n: np.bool_(n % 2), torch.bool),
    "arrays without dimensions": (lambda n: np.array(n, np.uint8), torch.uint8),
    "big-endian arrays": (lambda n: np.array([n, n / 2], ">f4"), torch.float32),
    "big-endian scalars": (lambda n: np.array(n, ">i2"), torch.int16),
    "transposed arrays": (lambda n: (np.arange(6).reshape(2, 3) + n).T[::-1], torch.int64),
    "every second element": (lambda n: (np.arange(8, dtype=np.uint16) + n)[::2], torch.uint16),
    "lists": (lambda n: [n, n + 1], torch.int64),
    "lists of integers and real numbers": (lambda n: [[n, 0.5, np.nan, np.inf, 2**53]], torch.float64),
    "lists of arrays": (lambda n: [np.array([n, 0.5]), (n, n)], torch.float64),
    "tensors": (lambda n: torch.tensor([n, 1], dtype=torch.int32), torch.int32),
    "NaN and infinity": (lambda n: np.array([np.nan, np.inf, -0.0, n], np.float32), torch.float32),
}


@pytest.mark.parametrize("kind", EXACT)
def test_numbers_are_exact(manifest: Manifest, kind: str) -> None:
    make, dtype = EXACT[kind]
    batches = returned(manifest, lambda sample, rng: {"x": make(int(sample["n"])), "n": sample["n"]})
    for batch in batches:
        expected = np.stack([np.asarray(make(n)) for n in batch["n"].tolist()])
        assert batch["x"].dtype == dtype
        assert batch["x"].numpy().tobytes() == expected.astype(expected.dtype.newbyteorder("=")).tobytes()
        assert batch["x"].shape == expected.shape


@pytest.mark.parametrize(
    "make",
    [
        lambda n: "",
        lambda n: "" if n % 2 else "\0é\0",
        lambda n: np.str_(f"{n}\0"),
        lambda n: b"",
        lambda n: bytes([n, 0]),
        lambda n: np.bytes_(bytes([n, 0])),
    ],
)
def test_texts_are_exact(manifest: Manifest, make: Any) -> None:
    batches = returned(manifest, lambda sample, rng: {"x": make(int(sample["n"])), "n": sample["n"]})
    assert len(batches) == 8
    for batch in batches:
        assert batch["x"] == [make(n) for n in batch["n"].tolist()]


def test_a_map_may_use_the_memory_of_a_sample_again(manifest: Manifest) -> None:
    batches = returned(manifest, memory_used_again())
    found = torch.cat([batch["x"] for batch in batches])
    assert sorted(found[:, 0, 0].tolist()) == list(range(NUM_ROWS))
    assert torch.equal(found[:, 0, 0], found[:, 1, 1])


REFUSED = {
    "None": (None, "NoneType"),
    "an array of objects": (np.array([None, 1]), "ndarray"),
    "an array of strings": (np.array(["a", "b"]), "ndarray of type <U1"),
    "a list of strings": (["a", "b"], "list of type <U1"),
    "a complex number": (1j, "complex of type complex128"),
    "a long real number": (np.longdouble(1), f"longdouble of type {np.dtype(np.longdouble)}"),
    "a date": (np.datetime64("2026-01-01"), r"datetime64 of type datetime64\[D\]"),
    "an integer above 2**64": (2**64, "int"),
    "a list with an integer above 2**53 and a real number": (
        [2**53 + 1, 0.5],
        "list with integers that float64 would round",
    ),
    "a list of lists of several lengths": ([[1], [1, 2]], "list (.*inhomogeneous.*)"),
    "a tensor of bfloat16": (torch.zeros(2, dtype=torch.bfloat16), "Tensor (.*BFloat16.*)"),
    "a masked array": (np.ma.array([1, 2], mask=[False, True]), "a masked array"),
    "an empty array": (np.zeros((0, 3)), r"an empty array of shape \[0, 3\]"),
    "an empty list": ([], r"an empty array of shape \[0\]"),
    "a str with surrogates": ("\ud800", "a str with surrogates"),
    "a set": ({1}, "set"),
    "a dict": ({"a": 1}, "dict"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_values_that_batches_cannot_hold_are_refused(manifest: Manifest, kind: str) -> None:
    value, given = REFUSED[kind]
    (error,) = returned(manifest, lambda sample, rng: {"x": value})
    with pytest.raises(UsageError, match=f"'x' as {given} for sample 0 of {manifest.url}, which batches cannot hold; "):
        raise error


@pytest.mark.parametrize("name", ["__id", 0, None])
def test_names_that_columns_cannot_have_are_refused(manifest: Manifest, name: Any) -> None:
    (error,) = returned(manifest, lambda sample, rng: {name: 1})
    with pytest.raises(UsageError, match=f"a column named {name!r} for sample 0 of {manifest.url}"):
        raise error


def fails_late(sample: Sample, rng: np.random.Generator) -> Sample:
    if sample["n"] == 21:
        raise ValueError("no such image")
    return sample


def test_an_exception_of_a_map_names_the_sample_and_keeps_the_traceback(manifest: Manifest) -> None:
    with pytest.raises(ValueError, match="no such image") as caught:
        list(stream(manifest, PLAN, map=fails_late))
    text = "".join(traceback.format_exception(caught.value))
    assert f"raised by the map for sample 21 of {manifest.url}" in text
    assert "in fails_late" in text
    assert pickle.loads(pickle.dumps(caught.value)).__notes__ == caught.value.__notes__


def test_shapes_survive_the_concatenation_of_ray_data(manifest: Manifest) -> None:
    """Ray Data drops the metadata of fields where tables differ."""
    plan = Plan(PLAN, manifest.num_rows)
    window = next(EpochOrder(plan, manifest.row_counts, 0).windows(0))
    reads = WindowReads(manifest, manifest.columns)
    sample_map = StreamMap(transposed, 1, reads).keyed(1, manifest.url)
    read = reads.of(window, sample_map=sample_map)
    table = read()
    bare = table.replace_schema_metadata(None).cast(pa.schema([field.remove_metadata() for field in table.schema]))
    for parts in ([table.slice(0, 1), bare.slice(1)], [concat([bare.slice(0, 2), table.slice(2)])]):
        taken = WindowRows(read, parts).take(0, read.num_rows)
        expected = [transposed({"n": n}, np.random.default_rng())["x"].tolist() for n in taken.ids]
        assert taken.batch["x"].tolist() == expected


def fixed_lists(*rows: list[int | None] | None) -> pa.Array:
    return pa.array(rows, pa.list_(pa.int32(), 2))


UNEVEN = {
    "a null in a list": fixed_lists([0, 0], [1, None], [2, 2], [3, 3]),
    "a null list": fixed_lists([0, 0], None, [2, 2], [3, 3]),
    "a null in a slice": fixed_lists([9, 9], None, [0, 0], [1, None], [2, 2], [3, 3])[2:],
    "a null text": pa.array(["a", None, "c", "d"]),
    "null bytes": pa.array([b"a", b"", None, b"d"]),
    "a null large text": pa.array(["a", None, "c", "d"], pa.large_string()),
    "a null boolean": pa.array([True, None, False, True]),
    "a null real number": pa.array([0.0, np.nan, None, 3.0], pa.float16()),
    "a null integer that a real number cannot hold": pa.array([2**53 + 1, None, 2, 3], pa.int64()),
}


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("kind", UNEVEN)
def test_nulls_are_refused_before_the_map_sees_their_window(tmp_path: Path, kind: str, is_mapped: bool) -> None:
    """The first two row groups have no nulls, and the map may see their rows."""
    table = pa.table({"x": UNEVEN[kind], "id": pa.array([4, 5, 6, 7])})
    good = pa.table({"x": pa.array([UNEVEN[kind][0].as_py()] * 4, UNEVEN[kind].type), "id": pa.array(range(4))})
    manifest = write_table(tmp_path, pa.concat_tables([good, table]), num_shards=2)
    assert manifest.row_counts.tolist() == [4, 4]
    seen: list[int] = []

    def remember(sample: Sample, rng: np.random.Generator) -> Sample:
        seen.append(int(sample["id"]))
        return {"id": sample["id"]}

    plan = PlanSpec(global_batch=4, virtual_workers=1, window=1, shuffle="none")
    batches = iter(stream(manifest, plan, map=remember if is_mapped else None))
    next(batches)
    with pytest.raises(ManifestError, match="column 'x' has nulls"):
        next(batches)
    assert not {4, 5, 6, 7} & set(seen)


def test_nan_is_a_number_to_a_map(tmp_path: Path) -> None:
    values = np.array([np.nan, 1, np.inf, -np.nan], np.float32)
    manifest = write_table(tmp_path, {"x": values})
    (batch,) = stream(manifest, PLAN, map=lambda sample, rng: {"x": sample["x"]})
    assert batch["x"].numpy().tobytes() == values.tobytes()
