"""Files of the formats that `undula data convert` reads, and what becomes of them."""

import base64
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
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


class Keys(encryption.KmsClient):
    """Store of keys that returns them as they are."""

    def wrap_key(self, key: bytes, master: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, key: bytes, master: str) -> bytes:
        return base64.b64decode(key)


def encrypted(file: Path, has_plain_footer: bool) -> None:
    """Write a Parquet file whose column n is encrypted, and with it the footer if it is not plain."""
    spec = encryption.EncryptionConfiguration("footer", column_keys={"n": ["n"]}, plaintext_footer=has_plain_footer)
    factory = encryption.CryptoFactory(lambda config: Keys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), spec)
    with pq.ParquetWriter(file, TABLE.schema, encryption_properties=properties) as writer:
        writer.write_table(TABLE)


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
