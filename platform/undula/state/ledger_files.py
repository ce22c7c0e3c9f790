"""Files of a ledger: their names, their schemas, and how to read all of them while a run writes and merges them.

A file is written once and does not change. Plain files come from a single writer each. A merged file has the rows of other files, which
are deleted once it is complete; until then, and if that is interrupted, rows exist twice, and `union` counts them once. Merged files have
names that sort after those of plain files and of earlier merged files.
"""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from undula.errors import StorageError, one_line
from undula.storage import Store

LEDGER = "ledger"
READERS = 32
"""Maximum number of files that are read at once."""
MOST_LISTINGS = 50
"""Maximum number of listings of a ledger before a reader gives up. Each one only leads to reads of files that are new in it."""

STEP_SCHEMA = pa.schema(
    [
        ("attempt", pa.int32()),
        ("step", pa.int64()),  # index of the first step of the plan in this optimizer step, from 0
        # number of steps of the plan that the optimizer merged into this one; more than 1 only if the batch is elastic
        ("merged_steps", pa.int32()),
        ("epoch", pa.int32()),
        ("samples", pa.int64()),  # samples that the run has consumed, this step included
        ("step_samples", pa.int32()),
        ("world_size", pa.int32()),  # number of ranks
        # number of cells, the smallest sets of ranks that run a micro-batch; equals world_size unless a model spans several ranks
        ("cells", pa.int32()),
        ("loss", pa.float64()),  # mean over the step's samples
        ("lr", pa.float64()),
        # duration of the step by class, in seconds, mean over the ranks; the five classes add up to the step
        ("data_s", pa.float64()),
        ("transfer_s", pa.float64()),  # seconds for which the device waited for copies of samples; 0 on CPUs
        ("compute_s", pa.float64()),
        ("communication_s", pa.float64()),
        ("other_s", pa.float64()),
        ("sample_digest", pa.uint64()),  # undula.plan.keys.multiset_digest of the step's sample ids
        ("time", pa.float64()),  # time of the commit in seconds since the epoch
        ("logged", pa.string()),  # JSON object of step.log(...)
        ("weights_digest", pa.uint64()),  # digest after the step, every few steps; else null
        ("blocked_s", pa.float64()),  # seconds before the step for which a checkpoint blocked training
        ("grad_norm", pa.float64()),  # norm of the step's gradient before clipping
        ("applied", pa.bool_()),  # whether the optimizer changed the weights
        # part of communication_s: seconds for which ranks waited for the one that was ready last, mean over the ranks
        ("wait_s", pa.float64()),
    ]
)
EVENT_SCHEMA = pa.schema(
    [
        ("time", pa.float64()),
        ("kind", pa.string()),  # of a class of undula.state.events
        ("step", pa.int64()),  # number of committed steps when the event happened; null if unknown
        ("message", pa.string()),
        ("data", pa.string()),  # JSON object of the fields of that class
    ]
)
ROW_ID = "row_id"
"""Column of merged files of events: the name of the file that had the row first, and the row's number in it."""


@dataclass(frozen=True)
class Kind:
    """Kind of rows. Each kind has files of its own."""

    name: str
    schema: pa.Schema
    """Columns of the rows for readers."""
    identity: tuple[str, ...]
    """Columns that identify a row, in whichever files it is."""

    @property
    def file_schema(self) -> pa.Schema:
        """Columns of the rows in memory and in merged files."""
        return self.schema if self.identity != (ROW_ID,) else self.schema.append(pa.field(ROW_ID, pa.string()))

    def includes(self, file: str) -> bool:
        """Return whether a file of the ledger has rows of this kind."""
        return file.startswith(f"{self.name}-") and file.endswith(".parquet")


STEPS = Kind("steps", STEP_SCHEMA, ("attempt", "step"))
EVENTS = Kind("events", EVENT_SCHEMA, (ROW_ID,))
KINDS = (STEPS, EVENTS)


def kind_of(file: str) -> Kind | None:
    """Return the kind of rows that a file has, given its name; None if it is not part of the ledger."""
    return next((kind for kind in KINDS if kind.includes(file)), None)


def file_names(store: Store) -> frozenset[str]:
    """Return the names of all files of a ledger, relative to its folder."""
    return frozenset(name for name in store.names(LEDGER) if kind_of(name))


def to_bytes(rows: pa.Table) -> bytes:
    """Return the content of a file with these rows."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    return bytes(sink.getvalue())


def read_files(store: Store, known: Collection[str] = ()) -> dict[str, pa.Table]:
    """Read all files of a ledger as they are at one moment, by name, except those that the caller knows already.

    Files may be added and merged meanwhile. So the result is only complete if the files are listed again after they were read, and are
    still the same; otherwise, those that are new are read too.

    Raises:
        StorageError: The ledger cannot be read. If a file is the reason, it exists and has been read twice.
    """
    tables: dict[str, pa.Table] = {}
    failed: set[str] = set()
    names = file_names(store)
    for _ in range(MOST_LISTINGS):
        results = read_each(store, sorted(names - tables.keys() - {*known}))
        listed = file_names(store)
        for name, result in results.items():
            if isinstance(result, pa.Table):
                tables[name] = result
            elif name in failed and name in listed:
                raise result
            else:
                failed.add(name)
        if listed == names and names <= tables.keys() | {*known}:
            return {name: tables[name] for name in sorted(names - {*known})}
        names = listed
    raise StorageError(f"{store.url}/{LEDGER} changes faster than it can be read; try again")


def read_each(store: Store, names: Sequence[str]) -> dict[str, pa.Table | StorageError]:
    """Read files of a ledger, many at a time, and return the rows of each or the error with which reading it failed."""

    def read(name: str) -> pa.Table | StorageError:
        try:
            return _read(store, name)
        except StorageError as error:
            return error

    if not names:
        return {}
    with ThreadPoolExecutor(min(READERS, len(names)), thread_name_prefix="undula-ledger-read") as threads:
        return dict(zip(names, threads.map(read, names), strict=True))


def union(kind: Kind, tables: Iterable[pa.Table]) -> pa.Table:
    """Return the rows of files of one kind, each once, in the order in which they come first."""
    rows = pa.concat_tables([kind.file_schema.empty_table(), *tables])
    if kind is STEPS:
        # A step is below 2^40. A later attempt writes the last rows of a lost rank 0 again, as some may not be stored.
        keys = (rows["attempt"].to_numpy().astype(np.int64) << 40) | rows["step"].to_numpy()
    else:
        keys = rows[ROW_ID].combine_chunks().dictionary_encode().indices.to_numpy()
    _, first = np.unique(keys, return_index=True)
    return rows if len(first) == len(rows) else rows.take(pa.array(np.sort(first)))


def _read(store: Store, name: str) -> pa.Table:
    """Read a file by a single request, because it may be deleted at any moment."""
    data = store.read(f"{LEDGER}/{name}")
    kind = kind_of(name)
    assert kind is not None
    try:
        return _with_schema(pq.ParquetFile(pa.BufferReader(data)).read(), kind, name)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise StorageError(
            f"{store.url}/{LEDGER}/{name} cannot be read as a Parquet file of the ledger ({one_line(error)}); wait if the run is still "
            "being copied, or restore this file from another copy"
        ) from error


def _with_schema(rows: pa.Table, kind: Kind, name: str) -> pa.Table:
    """Return rows with exactly the columns of their kind. Another version may have written fewer or more."""
    if kind is EVENTS and ROW_ID not in rows.column_names:
        stem = PurePosixPath(name).stem
        rows = rows.append_column(ROW_ID, pa.array([f"{stem}:{number}" for number in range(len(rows))], pa.string()))
    for required in kind.identity:
        rows[required]  # raises a KeyError
    columns = [
        rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(len(rows), field.type)
        for field in kind.file_schema
    ]
    return pa.table(columns, schema=kind.file_schema)
