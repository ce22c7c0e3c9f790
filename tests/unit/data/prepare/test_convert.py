"""Tests of `undula data convert`: every row arrives in columns that batches support, in row groups of the requested size."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_files import ROWS, TABLE

from undula.cli.main import main
from undula.data import load_manifest, stream
from undula.data.prepare.write import array_column, array_field
from undula.plan.plan import PlanSpec


@pytest.fixture
def undula_data() -> Callable[..., None]:
    def run(command: str, source: Path, *options: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(("data", command, str(source), *options))
        assert not ended.value.code

    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "label=3"
    folder.mkdir()
    for number in range(3):
        pq.write_table(TABLE.slice(number * 19, 19), folder / f"{number}.parquet", row_group_size=5)
    return folder


def test_lists_of_equal_length_become_arrays_and_images_become_bytes(
    tmp_path: Path, undula_data: Callable[..., None]
) -> None:
    columns = {
        "pair": [[row, row + 1] for row in range(6)],
        "grid": [[[row, 1, 2], [3, 4, 5]] for row in range(6)],
        "image": [{"bytes": bytes([row]), "path": None} for row in range(6)],
        "kind": pa.array(["a", "b"] * 3).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    undula_data("convert", tmp_path / "0.parquet", "--out", str(tmp_path / "out"), "--shards", "1")
    batch = next(iter(stream(str(tmp_path / "out"), PlanSpec(global_batch=6, virtual_workers=1, shuffle="none"))))
    assert batch["pair"].tolist() == columns["pair"]
    assert batch["grid"].tolist() == columns["grid"]
    assert batch["image"] == [bytes([row]) for row in range(6)]
    assert batch["kind"] == ["a", "b"] * 3


def test_row_groups_have_the_requested_size(tmp_path: Path, source: Path, undula_data: Callable[..., None]) -> None:
    out = str(tmp_path / "out")
    undula_data("convert", source, "--out", out, "--shards", "2", "--row-group-mib", "0.0005", "--shuffle", "3")
    manifest = load_manifest(out)
    assert manifest.num_rows == ROWS
    assert len(manifest.files) == 2
    assert manifest.row_counts.max() <= 22  # rows of about 24 bytes


def test_the_command_refuses_to_overwrite_its_input(source: Path) -> None:
    with pytest.raises(SystemExit):
        main(["data", "convert", str(source), "--out", f"{source}/"])
    assert len(list(source.glob("*.parquet"))) == 3


def test_indexing_says_which_partitions_are_no_column(
    source: Path, capsys: pytest.CaptureFixture[str], undula_data: Callable[..., None]
) -> None:
    undula_data("index", source.parent)
    text = capsys.readouterr().out
    assert "the folders label=... do not become a column; `undula data convert` makes one of them" in text


IMAGES = np.arange(24, dtype=np.float32).reshape(4, 2, 3)


def ray_tensors() -> pa.Field:
    """Return the field of a column that Ray Data has written, in a process that has not imported Ray."""
    metadata = {"ARROW:extension:name": "ray.data.arrow_tensor_v2", "ARROW:extension:metadata": "[2, 3]"}
    return pa.field("image", pa.large_list(pa.float32()), metadata=metadata)


@pytest.mark.parametrize("of", ["Undula", "Arrow", "Ray Data"])
def test_tensors_keep_their_shape(tmp_path: Path, of: str, undula_data: Callable[..., None]) -> None:
    if of == "Undula":
        field = array_field("image", pa.float32(), (2, 3))
        table = pa.table([array_column(field, IMAGES)], schema=pa.schema([field]))
    elif of == "Arrow":
        table = pa.table({"image": pa.FixedShapeTensorArray.from_numpy_ndarray(IMAGES)})
    else:
        table = pa.table([IMAGES.reshape(4, 6).tolist()], schema=pa.schema([ray_tensors()]))
    pq.write_table(table, tmp_path / "a.parquet")
    undula_data("convert", tmp_path / "a.parquet", "--out", str(tmp_path / "out"), "--shards", "1")
    batch = next(iter(stream(str(tmp_path / "out"), PlanSpec(global_batch=4, virtual_workers=1, shuffle="none"))))
    assert batch["image"].tolist() == IMAGES.tolist()
