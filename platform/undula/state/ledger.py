"""The ledger of a run: append-only Parquet files with one row per committed step and one row per event.

Every start of a worker group is an *attempt*. An attempt that resumes at step c replaces the rows of earlier attempts from step c on;
`committed` selects the rows that make up the run. Each writer has its own files, so no writer can replace the rows of another. Rows reach
storage before the checkpoint that covers them is committed, so every step before a committed checkpoint has its row.

Also here: compaction of a ledger: many small files are merged into one from time to time, so that a long run is read in seconds.

The merged file is written before its sources are deleted, and readers count a row once, in however many files it is. So an interruption
at any moment leaves all rows, and two processes that merge the same files at once do no harm.
"""

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from secrets import token_hex
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from undula.errors import StorageError, SupersededError
from undula.state.attempts import EVERYTHING, Lineage, read_lineage, require_newest
from undula.state.events import Event, read_event
from undula.state.ledger_files import (
    EVENTS,
    KINDS,
    LEDGER,
    READERS,
    STEPS,
    Kind,
    file_names,
    read_each,
    read_files,
    to_bytes,
    union,
)
from undula.state.records import StepRow
from undula.storage import Entry, Store

TIERS_BYTES = (64 * 2**10, 2**20, 16 * 2**20)
"""Limits of the sizes of files in bytes, by tier. Only files of the same tier are merged, and none that is larger than the last limit, so
that a row is copied a few times at most."""
FILES_PER_TIER = 16
"""Number of files of a tier from which on they are merged."""
MOST_SOURCES = 512
"""Maximum number of files that are merged at once."""


def due_merge(files: Sequence[Entry]) -> tuple[str, ...]:
    """Return the names of the files of one kind that are to be merged now, smallest first; empty if there are few files.

    They are those of the lowest tier that has many files, up to a total of the last limit of TIERS_BYTES.
    """
    lower = 0
    for upper in TIERS_BYTES:
        tier = sorted((file.bytes, file.name) for file in files if lower <= file.bytes < upper)
        lower = upper
        if len(tier) < FILES_PER_TIER:
            continue
        sources: list[str] = []
        total = 0
        for num_bytes, name in tier[:MOST_SOURCES]:
            if len(sources) >= 2 and total >= TIERS_BYTES[-1]:
                break
            sources.append(name)
            total += num_bytes
        return tuple(sources)
    return ()


def compact(store: Store) -> bool:
    """Merge files of the ledger of a run if there are many.

    Args:
        store: Run directory.

    Returns:
        Whether files were merged. There may be more to merge then.

    Raises:
        StorageError: The storage failed. No row is lost.
    """
    entries = store.list(LEDGER)
    files = [Entry(entry.name.removeprefix(f"{LEDGER}/"), entry.bytes, entry.version) for entry in entries]
    merged = False
    for kind in KINDS:
        own = [file for file in files if kind.includes(file.name)]
        if sources := due_merge(own):
            number = 1 + max((_number(kind, file.name) for file in own), default=0)
            merged |= _merge(store, kind, sources, number)
    return merged


def _merge(store: Store, kind: Kind, sources: Sequence[str], number: int) -> bool:
    """Merge files into one that has a number. Those that cannot be read, or are gone, are left alone."""
    results = read_each(store, sorted(sources))
    tables = {name: result for name, result in results.items() if isinstance(result, pa.Table)}
    if len(tables) < 2:
        return False
    # The token keeps two processes that choose the same number from writing the same file.
    name = f"{kind.name}-merged-{number:08d}-{token_hex(8)}.parquet"
    store.write(f"{LEDGER}/{name}", to_bytes(union(kind, tables.values())))
    with ThreadPoolExecutor(READERS, thread_name_prefix="undula-ledger-delete") as threads:
        list(threads.map(lambda source: store.delete(f"{LEDGER}/{source}"), tables))
    return True


def _number(kind: Kind, name: str) -> int:
    """Return the number of a merged file; 0 for a plain file."""
    number = name.removeprefix(f"{kind.name}-merged-").partition("-")[0]
    return int(number) if name.startswith(f"{kind.name}-merged-") and number.isdecimal() else 0


E = TypeVar("E", bound=Event)

FLUSH_INTERVAL_S = 5.0


class RowWriter:
    """Writer of rows to a series of files of its own. Each flush writes one file with the rows since the last one.

    Files do not change once they are written, because another process may have merged them into another one, and deleted them.
    """

    def __init__(self, store: Store, kind: Kind, writer: str):
        self._store = store
        self._kind = kind
        self._prefix = f"{LEDGER}/{kind.name}-{writer}-{token_hex(8)}"
        self._rows: list[dict[str, Any]] = []
        self._unwritten: list[dict[str, Any]] = []
        """Rows of the file whose write failed. Storage may have it nevertheless, so the same rows are written again under its name."""
        self.files = 0
        """Number of files that were written."""
        self.last_flushed: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def append(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._rows.append(row)

    def flush(self) -> None:
        """Write the rows so far to storage.

        Raises:
            StorageError: The storage cannot be written to.
        """
        with self._flushing:
            if self._unwritten:
                self._write()
            with self._lock:  # released before the write: `append` is called by training and must not wait for storage
                self._unwritten, self._rows = self._rows, []
            if self._unwritten:
                self._write()

    def _write(self) -> None:
        content = to_bytes(pa.Table.from_pylist(self._unwritten, schema=self._kind.schema))
        self._store.write(f"{self._prefix}-{self.files:08d}.parquet", content)
        self.last_flushed, self._unwritten = self._unwritten[-1], []
        self.files += 1


class EventWriter:
    """Writer of events, which are flushed at once. The controller and the driver have one each."""

    def __init__(self, store: Store, writer: str):
        self._events = RowWriter(store, EVENTS, writer)

    def event(self, event: Event) -> None:
        self._events.append(event.row())
        with suppress(StorageError):  # a full disk must not end training; the next flush writes this row too
            self._events.flush()


class LedgerWriter(EventWriter):
    """Writer of one attempt's ledger, on rank 0. A thread flushes steps every few seconds.

    The thread also looks for a newer attempt. Once it has found one, this attempt cannot add steps. Otherwise, it compacts the ledger from
    time to time, including the files of other writers.
    """

    def __init__(self, store: Store, attempt: int):
        super().__init__(store, f"{attempt:06d}")
        self._store, self._attempt = store, attempt
        self._superseded: SupersededError | None = None
        self._steps = RowWriter(store, STEPS, f"{attempt:06d}")
        self._next_compaction = 0
        """Number of own files at which the ledger is compacted."""
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

    @property
    def stored_steps(self) -> int:
        """Number of steps whose rows have reached storage."""
        last = self._steps.last_flushed
        return int(last["step"] + last["merged_steps"]) if last else 0

    def flush(self) -> None:
        """Write all rows to storage. Events come first: whoever sees the row of a step sees the events before it, such as validations.

        Raises:
            StorageError: The storage cannot be written to.
        """
        self._events.flush()
        self._steps.flush()

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
                else:
                    self._compact_from_time_to_time()

    def _compact_from_time_to_time(self) -> None:
        files = self._steps.files + self._events.files
        if files >= self._next_compaction:
            self._next_compaction = files if compact(self._store) else files + FILES_PER_TIER


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
    files = read_files(store)
    rows, events = (
        union(kind, [table for name, table in files.items() if kind.includes(name)]).select(kind.schema.names)
        for kind in (STEPS, EVENTS)
    )
    # An attempt begins before it writes a row, so the record that is read after the rows includes the attempts of all of them.
    keep = committed(rows["attempt"].to_numpy(), rows["step"].to_numpy(), read_lineage(store))
    return Ledger(
        steps=rows.filter(pa.array(keep)).sort_by("step"),
        replaced=rows.filter(pa.array(~keep)).sort_by([("attempt", "ascending"), ("step", "ascending")]),
        events=events.sort_by("time"),
    )


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
    present, of = np.unique(attempts, return_inverse=True)
    first = np.full(len(present), np.iinfo(np.int64).max)
    np.minimum.at(first, of, steps)
    starts = {**dict(zip(present.tolist(), first.tolist(), strict=True)), **lineage.starts}
    limits, limit = {}, np.iinfo(np.int64).max
    for attempt in sorted(starts, reverse=True):
        if lineage.includes(attempt):
            limits[attempt] = limit
            limit = min(limit, starts[attempt])
    return np.asarray(steps < np.array([limits.get(attempt, -1) for attempt in present.tolist()])[of], dtype=bool)


def has_steps(store: Store) -> bool:
    """Return whether a run has recorded any steps."""
    return any(STEPS.includes(name) for name in file_names(store))


def recorded_attempts(store: Store) -> frozenset[int]:
    """Return the numbers of attempts that have files of their own in the ledger.

    Those that have none left, because their files were merged, are older than an attempt that has begun.
    """
    matches = [re.match(r"events-(\d{6})-", name) for name in file_names(store)]
    return frozenset(int(match[1]) for match in matches if match)


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
    events = events_of(table, event_type)
    return events[-1] if events else None
