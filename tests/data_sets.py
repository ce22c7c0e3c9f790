"""Small data sets of tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from undula.data.prepare.write import ROW_GROUP_BYTES, write_shards
from undula.data.stored.manifest import Manifest
from undula.storage import Store, open_store


def write_table(
    where: Path | str | Store,
    table: pa.Table | Mapping[str, Any],
    num_shards: int = 1,
    row_group_bytes: int = ROW_GROUP_BYTES,
) -> Manifest:
    """Write a table, or columns by name, as a data set."""
    store = where if isinstance(where, Store) else open_store(str(where))
    rows = table if isinstance(table, pa.Table) else pa.table(table)
    return write_shards(store, [rows], rows.schema, rows.num_rows, num_shards, row_group_bytes)
