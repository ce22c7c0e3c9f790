"""The ledger of a run: append-only Parquet files with one row per committed step and one row per event.

Every start of a worker group is an *attempt*. An attempt that resumes at step c replaces the rows of earlier attempts from step c on;
`committed` selects the rows that make up the run. Each writer has its own files, so no writer can replace the rows of another. Rows reach
storage before the checkpoint that covers them is committed, so every step before a committed checkpoint has its row.
"""

import re
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from secrets import token_hex
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from undula.errors import StorageError, SupersededError
from undula.state.attempts import EVERYTHING, Lineage, read_lineage, require_newest
from undula.state.events import Event, read_event
from undula.state.records import StepRow
from undula.storage import Store

E = TypeVar("E", bound=Event)

LEDGER = "ledger"
SEGMENT_ROWS = 10_000
FLUSH_INTERVAL_S = 5.0

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
        # duration of the step by class, in seconds, mean over the ranks; the four classes add up to the step
        ("data_s", pa.float64()),
        ("compute_s", pa.float64()),
        ("communication_s", pa.float64()),
        ("other_s", pa.float64()),
        ("sample_digest", pa.uint64()),  # undula.plan.keys.multiset_digest of the step's sample ids
        ("time", pa.float64()),  # time of the commit in seconds since the epoch
        ("logged", pa.string()),  # JSON object of step.log(...)
        ("weights_digest", pa.uint64()),  # digest after the step, every few steps of a deterministic run; else null
        ("blocked_s", pa.float64()),  # seconds before the step for which a checkpoint blocked training
        ("grad_norm", pa.float64()),  # norm of the step's gradient before clipping
        ("applied", pa.bool_()),  # whether the optimizer changed the weights
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


class SegmentWriter:
    """Writer of rows to a series of Parquet files of its own. Each flush rewrites the newest file until it has SEGMENT_ROWS rows."""

    def __init__(self, store: Store, prefix: str, schema: pa.Schema):
        self._store = store
        self._prefix = f"{prefix}-{token_hex(4)}"
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self._segment = 0
        self._flushed = 0
        self.last_flushed: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def append(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._rows.append(row)

    def flush(self) -> None:
        with self._flushing:
            with self._lock:  # released before the write: `append` is called by training and must not wait for storage
                rows = list(self._rows)
            if self._flushed == len(rows):
                return
            sink = pa.BufferOutputStream()
            pq.write_table(pa.Table.from_pylist(rows, schema=self._schema), sink, compression="zstd")
            self._store.write(f"{LEDGER}/{self._prefix}-{self._segment:05d}.parquet", sink.getvalue().to_pybytes())
            self._flushed, self.last_flushed = len(rows), rows[-1]
            if len(rows) >= SEGMENT_ROWS:
                with self._lock:
                    self._rows = self._rows[len(rows) :]
                self._flushed = 0
                self._segment += 1


class LedgerWriter:
    """Writer of one attempt's ledger, on rank 0. A thread flushes steps every few seconds; events are flushed at once.

    The thread also looks for a newer attempt. Once it has found one, this attempt cannot add steps.
    """

    def __init__(self, store: Store, attempt: int):
        self._store, self._attempt = store, attempt
        self._superseded: SupersededError | None = None
        self._steps = SegmentWriter(store, f"steps-{attempt:06d}", STEP_SCHEMA)
        self._events = SegmentWriter(store, f"events-{attempt:06d}", EVENT_SCHEMA)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._flush_regularly, name="undula-ledger", daemon=True)
        self._thread.start()

    def step(self, row: StepRow) -> None:
        """Add the row of a committed step.

        Raises:
            SupersededError: A newer attempt of the run exists.
        """
        if self._superseded:
            raise self._superseded
        self._steps.append(asdict(row))

    def event(self, event: Event) -> None:
        self._events.append(event.row())
        with suppress(StorageError):  # a full disk must not end training; the next flush writes this row too
            self._events.flush()

    @property
    def stored_steps(self) -> int:
        """Number of steps whose rows have reached storage."""
        last = self._steps.last_flushed
        return int(last["step"] + last["merged_steps"]) if last else 0

    def flush(self) -> None:
        """Write all rows to storage.

        Raises:
            StorageError: The storage cannot be written to.
        """
        self._steps.flush()
        self._events.flush()

    def close(self) -> None:
        """Flush once more, ignoring errors: the rows that a checkpoint covers have been stored since its commit."""
        self._closed.set()
        self._thread.join()
        with suppress(StorageError):
            self.flush()

    def _flush_regularly(self) -> None:
        while not self._closed.wait(FLUSH_INTERVAL_S):
            with suppress(StorageError):  # the next flush writes these rows too; the flush before a commit must succeed
                self.flush()
                try:
                    require_newest(self._store, self._attempt)
                except SupersededError as error:
                    self._superseded = error


class EventWriter:
    """Writer of the events of the controller or the driver."""

    def __init__(self, store: Store, writer: str):
        self._events = SegmentWriter(store, f"events-{writer}", EVENT_SCHEMA)

    def event(self, event: Event) -> None:
        self._events.append(event.row())
        with suppress(StorageError):
            self._events.flush()


@dataclass(frozen=True)
class Ledger:
    """Content of a run's ledger."""

    steps: pa.Table
    """Committed steps, one row each, ordered by step."""
    replaced: pa.Table
    """Rows of steps that a crash or a resize lost and that a later attempt repeated."""
    events: pa.Table
    """Events, ordered by time."""


def read_ledger(store: Store) -> Ledger:
    """Read the ledger of the run in the directory `store`. The tables are empty if the run has no ledger yet."""
    lineage = read_lineage(store)
    names = [entry.name for entry in store.list(LEDGER)]
    rows = _once(_concat(store, [name for name in names if name.startswith(f"{LEDGER}/steps-")], STEP_SCHEMA))
    events = _concat(store, [name for name in names if name.startswith(f"{LEDGER}/events-")], EVENT_SCHEMA)
    keep = committed(rows["attempt"].to_numpy(), rows["step"].to_numpy(), lineage)
    return Ledger(
        steps=rows.filter(pa.array(keep)).sort_by("step"),
        replaced=rows.filter(pa.array(~keep)).sort_by([("attempt", "ascending"), ("step", "ascending")]),
        events=events.sort_by("time"),
    )


def _once(rows: pa.Table) -> pa.Table:
    """Drop duplicate rows. If rank 0 is lost, a later attempt writes the last rows of its attempt again, as some may not be stored."""
    keys = np.stack([rows["attempt"].to_numpy(), rows["step"].to_numpy()])
    _, first = np.unique(keys, axis=1, return_index=True)
    return rows.take(pa.array(np.sort(first)))


def committed(
    attempts: np.ndarray[Any, Any], steps: np.ndarray[Any, Any], lineage: Lineage = EVERYTHING
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Select the rows that make up the run: those whose step comes before the first step of every later attempt.

    Args:
        attempts: Attempt of each row, shape [rows].
        steps: Step of each row, shape [rows].
        lineage: First steps of the attempts. The first step of an attempt without a record is that of its first row.

    Returns:
        Whether each row is part of the run, shape [rows].
    """
    keep = np.zeros(len(steps), dtype=bool)
    limit = np.iinfo(np.int64).max
    for attempt in sorted({*attempts.tolist(), *lineage.starts}, reverse=True):
        if lineage.includes(attempt):
            own = attempts == attempt
            keep |= own & (steps < limit)
            limit = min(limit, lineage.starts[attempt] if attempt in lineage.starts else int(steps[own].min()))
    return keep


def has_steps(store: Store) -> bool:
    """Return whether a run has recorded any steps."""
    return any(re.match(rf"{LEDGER}/steps-", entry.name) for entry in store.list(LEDGER))


def recorded_attempts(store: Store) -> frozenset[int]:
    """Return the numbers of the attempts that have written to the ledger."""
    found = [re.match(rf"{LEDGER}/events-(\d{{6}})-", entry.name) for entry in store.list(LEDGER)]
    return frozenset(int(match[1]) for match in found if match)


def steps_done(steps: pa.Table) -> int:
    """Return the number of steps of the plan that ordered rows of committed steps cover."""
    return int(steps["step"][-1].as_py() + steps["merged_steps"][-1].as_py()) if len(steps) else 0


def decode_events(table: pa.Table) -> tuple[Event, ...]:
    """Return the events of rows of EVENT_SCHEMA, in the same order."""
    return tuple(map(read_event, table.to_pylist()))


def events_of(table: pa.Table, event_type: type[E]) -> list[E]:
    """Return the events of one type among rows of EVENT_SCHEMA, in the same order."""
    rows = table.filter(pc.equal(table["kind"], event_type.KIND)).to_pylist()
    return [event for event in map(read_event, rows) if isinstance(event, event_type)]


def last_event(table: pa.Table, event_type: type[E]) -> E | None:
    """Return the last event of one type among rows of EVENT_SCHEMA; None if there is none."""
    found = events_of(table, event_type)
    return found[-1] if found else None


def _concat(store: Store, names: list[str], schema: pa.Schema) -> pa.Table:
    tables = []
    for name in names:
        with store.open(name) as file:
            tables.append(pq.read_table(file))
    return pa.concat_tables(tables, promote_options="default") if tables else schema.empty_table()
