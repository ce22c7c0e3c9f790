"""Check of a data set for problems that stop or slow down training: damage, changes, nulls and row groups of unsuitable size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from undula.data.stored.manifest import NUMBER_TYPES, TEXT_TYPES, Manifest
from undula.data.stored.shards import Shard
from undula.errors import Finding, UndulaError

LARGE_BYTES = 128 * 2**20
"""Decoded size in bytes above which a row group counts as large: the share of one read task with the default `data.prefetch_mib` and
`data.read_tasks`. A worker also holds `plan.window` row groups for each of its virtual workers."""
SMALL_BYTES = 256 * 2**10
"""Median encoded size in bytes below which row groups count as small, because requests then take longer than the transfer of the bytes."""
FEW = 4
"""Number of row groups up to which their size does not matter. `undula data convert` writes as many files by default."""
SKEW = 4
"""Ratio of the largest to the median row group above which row groups count as uneven."""


ORDERED = NUMBER_TYPES - {"halffloat"}
"""Types for which Arrow can compute the minimum and maximum."""


def check(manifest: Manifest, advance: Callable[[int], None] = lambda row_groups: None) -> list[Finding]:
    """Read every row group and return the problems of the data set.

    Args:
        manifest: The data set.
        advance: Progress callback, called with 1 after each row group.
    """
    findings = list(_about_columns(manifest)) + list(_about_sizes(manifest))
    sizes: list[_Sizes] = []
    for place, file in enumerate(manifest.files):
        shard = Shard.of(manifest, place)
        try:
            metadata = shard.footer()
        except UndulaError as error:
            findings.append(Finding("error", str(error)))
            advance(len(file.row_groups))
            continue
        for number in range(metadata.num_row_groups):
            try:
                table = shard.row_group(number, [column.name for column in manifest.columns])
            except UndulaError as error:
                findings.append(Finding("error", str(error)))
            else:
                sizes.append(_Sizes(f"{shard}, row group {number}", table.nbytes, _stored_bytes(metadata, number)))
                findings += _about_row_group(manifest, sizes[-1].where, table, metadata.row_group(number))
            advance(1)
    return findings + list(_about_memory(sizes))


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a row group in bytes."""

    where: str
    decoded: int
    stored: int


def _stored_bytes(metadata: pq.FileMetaData, number: int) -> int:
    group = metadata.row_group(number)
    return sum(group.column(place).total_compressed_size for place in range(group.num_columns))


def _about_memory(sizes: Sequence[_Sizes]) -> Iterator[Finding]:
    large = [size for size in sizes if size.decoded > LARGE_BYTES]
    if large:
        most = max(large, key=lambda size: size.decoded)
        yield Finding(
            "warning",
            f"{len(large)} of {len(sizes)} row groups take more than {LARGE_BYTES / 2**20:g} MiB of memory (the largest is "
            f"{most.where}, with {most.decoded / 2**20:.2f} MiB decoded and {most.stored / 2**20:.2f} MiB stored); each is decoded as "
            "a whole, and a worker holds plan.window of them for each virtual worker; rewrite the data set with `undula data convert "
            "--row-group-mib 4`",
        )


def _about_columns(manifest: Manifest) -> Iterator[Finding]:
    for column in manifest.columns:
        if column.type not in NUMBER_TYPES | TEXT_TYPES:
            yield Finding(
                "warning",
                f"column {column.name!r} has type {column.type}, which batches do not support; leave it out of data.columns",
            )


def _about_sizes(manifest: Manifest) -> Iterator[Finding]:
    sizes = np.array([size for file in manifest.files for size in file.row_group_bytes])
    if not manifest.num_rows:
        yield Finding("error", f"{manifest.url} has no rows")
        return
    median = float(np.median(sizes))
    rewrite = "rewrite the data set with `undula data convert`"
    if median < SMALL_BYTES and len(sizes) > FEW:
        yield Finding(
            "warning",
            f"row groups are small (median {median / 1024:.0f} KiB), so most of the reading time is spent on requests; {rewrite}",
        )
    if sizes.max() > SKEW * median:
        yield Finding(
            "warning",
            f"row groups are uneven: the largest has {sizes.max() / max(median, 1):.0f} times the bytes of the median, and rows of a "
            f"large row group are mixed with few others in a shuffle window; {rewrite}",
        )


def _about_row_group(manifest: Manifest, where: str, table: pa.Table, group: pq.RowGroupMetaData) -> Iterator[Finding]:
    if table.num_rows != group.num_rows:
        yield Finding(
            "error", f"{where} has {table.num_rows} rows, but its footer says {group.num_rows}; write the file again"
        )
    recorded = {
        group.column(place).path_in_schema: group.column(place).statistics for place in range(group.num_columns)
    }
    for column in manifest.columns:
        values = table[column.name]
        nulls = values.null_count + (pc.list_flatten(values).null_count if column.shape else 0)
        if nulls:
            yield Finding(
                "error", f"{where}: column {column.name!r} has {nulls} nulls, which tensors cannot hold; replace them"
            )
        statistics = recorded.get(column.name)
        if statistics is not None and statistics.has_min_max and not column.shape and column.type in ORDERED:
            yield from _about_statistics(where, column.name, values, statistics)


def _about_statistics(where: str, name: str, values: pa.ChunkedArray, recorded: pq.Statistics) -> Iterator[Finding]:
    actual = pc.min_max(values).as_py()
    if (actual["min"], actual["max"]) != (recorded.min, recorded.max):
        yield Finding(
            "error",
            f"{where}: the values of column {name!r} range from {actual['min']} to {actual['max']}, but the footer says {recorded.min} "
            f"to {recorded.max}; the file is damaged or was written wrongly, so write it again",
        )
