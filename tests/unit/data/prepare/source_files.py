"""Files of the formats that `undula data convert` reads, and what becomes of them."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from undula.data.prepare.sources import open_source
from undula.errors import ManifestError

ROWS = 57
TABLE = pa.table({"n": np.arange(ROWS), "x": np.arange(ROWS) / 4, "name": [f"row {row}" for row in range(ROWS)]})


def saved_to_disk(folder: Path, table: pa.Table = TABLE, **state: Any) -> None:
    """Write the files that datasets.save_to_disk writes (datasets 5.2.0)."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05d}-of-00003.arrow" for number in range(3)]
    for number, name in enumerate(names):
        arrow(folder / name, table.slice(number * 19, 19))
    form = {"_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False}
    files = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps({**files, "_fingerprint": "f00d", **form, "_split": None, **state}))
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "features": {}, "license": ""}))


def arrow(file: Path, table: pa.Table) -> None:
    with pa.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=10)


def tar(file: Path, *members: tuple[str, bytes]) -> None:
    file.parent.mkdir(exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def rows(url: Path | str, columns: tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    source = open_source(str(url), columns)
    table = pa.concat_tables(source.tables())
    assert pa.concat_tables(source.tables()).equals(table)  # a source can be read several times
    assert table.num_rows == source.num_rows
    assert table.schema == source.schema
    return [dict(row) for row in table.to_pylist()]


def refusal(url: Path | str, columns: tuple[str, ...] | None = None) -> str:
    with pytest.raises(ManifestError) as refused:
        rows(url, columns)
    return str(refused.value)
