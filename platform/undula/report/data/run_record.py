"""Record of a run, read from its directory: the submitted job, the ledger and the events."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from undula.errors import RunError, UndulaError
from undula.report.text import printable
from undula.state.directory import JOB_FILE, STUDY_FILE
from undula.state.events import Event
from undula.state.heartbeat import driver_state
from undula.state.ledger import Ledger, decode_events, read_ledger
from undula.storage import Store


@dataclass(frozen=True)
class JobRecord:
    """Job as it was submitted, from job.json of a run directory."""

    name: str
    plan_digest: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Resolved spec as a tree, without the values of secrets."""
    total_steps: int = 0
    """Number of steps of the whole plan."""
    total_samples: int = 0
    """Number of samples of the whole plan."""
    train_rows: int = 0
    """Number of rows of the training data."""
    dataset: Mapping[str, Any] = field(default_factory=dict)
    """Record of the dataset that the script gave to the run; empty if the spec names the data."""


@dataclass(frozen=True)
class RecordedRun:
    """Content of a run directory."""

    job: JobRecord
    ledger: Ledger
    events: tuple[Event, ...]
    """Events of the ledger in order of time."""
    has_driver: bool | None = None
    """Whether a driver is training the run; None if there is no heartbeat, as in a run of an older version."""


def read_run(store: Store) -> RecordedRun:
    """Read a run directory.

    Raises:
        RunError: The directory has no run, or its files have content that this version cannot read.
        StorageError: A file cannot be read.
    """
    if not store.exists(JOB_FILE):
        if store.exists(STUDY_FILE):
            raise RunError(
                f"{store.url} is a study; use `undula study status` for it, or name the directory of one of its runs, trials/NAME"
            )
        raise RunError(f"{store.url} has no {JOB_FILE}; name the directory of a run that `undula run` has started")
    try:
        job = _job_record(json.loads(store.read(JOB_FILE)))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{store.url}/{JOB_FILE} is damaged ({_reason(error)}); submit the job again") from error
    try:
        ledger = read_ledger(store)
        events = decode_events(ledger.events)
        is_over = bool(events) and events[-1].kind == "end"
        return RecordedRun(job, ledger, events, None if is_over else driver_state(store))
    except UndulaError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"the ledger of {store.url} has rows that this version of Undula cannot read ({_reason(error)}); use the version that wrote it"
        ) from error


def leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values of a tree by dotted key, such as ("plan.seed", 0)."""
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        is_section = isinstance(value, Mapping) and value
        found += leaves(value, f"{prefix}{key}.") if is_section else [(f"{prefix}{key}", value)]
    return found


def _job_record(tree: Any) -> JobRecord:
    record = JobRecord(**{key: tree[key] for key in JobRecord.__dataclass_fields__ if key in tree})
    if not isinstance(record.spec, Mapping):
        raise ValueError("spec is not a mapping")
    return JobRecord(
        name=str(record.name),
        plan_digest=str(record.plan_digest),
        spec=dict(record.spec),
        total_steps=int(record.total_steps),
        total_samples=int(record.total_samples),
        train_rows=int(record.train_rows),
        dataset=dict(record.dataset),
    )


def _reason(error: BaseException) -> str:
    return printable(" ".join(str(error).split()), 200)
