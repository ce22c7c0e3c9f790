"""Status and report of a study, read from its directory without its driver."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from undula.errors import needs_extra
from undula.state.directory import held
from undula.state.heartbeat import has_driver
from undula.storage import Store
from undula.study.job import Study
from undula.study.live_table import study_table
from undula.study.load import LoadedStudy
from undula.study.progress import StudyProgress, read_progress
from undula.study.records import read_spec
from undula.study.spec import StudySpec
from undula.study.trials import TrialRecord, trial_row


@dataclass(frozen=True)
class StudyStatus:
    """Status of a study."""

    spec: StudySpec
    records: tuple[TrialRecord, ...]
    """Records of the trials that the search wants so far."""
    has_driver: bool
    """Whether the driver of the study is running."""

    @property
    def has_ended(self) -> bool:
        """Whether every trial that the search wants so far has ended."""
        return all(record.has_ended for record in self.records)

    @property
    def is_over(self) -> bool:
        """Whether the study will not change until it is submitted again."""
        return not self.has_driver or self.has_ended

    def as_json(self) -> Mapping[str, Any]:
        """Return the status as a JSON object."""
        trials = [trial_row(self.spec, record) for record in self.records]
        return {"study": self.spec.name, "driver_alive": self.has_driver, "ended": self.has_ended, "trials": trials}

    def table(self) -> list[str]:
        """Return the table of the study as lines for a terminal."""
        return study_table(self.spec, self.records, self.is_over, self.has_driver).split("\n")


def read_status(store: Store) -> StudyStatus:
    """Return the status of the study in a directory.

    Raises:
        RunError: The directory has no study, or its record is damaged.
    """
    spec, is_running = read_spec(store), has_driver(store)
    records = list(read_progress(store, spec).records.values())
    if not is_running:  # trials that ran when the driver was lost wait for the next driver
        records = [replace(record, state="waiting") if record.state == "running" else record for record in records]
    return StudyStatus(spec, tuple(records), is_running)


def report_study(store: Store, worker_hour: float | None = None) -> list[str]:
    """Write the report of a study, which may be unfinished, and return its verdicts and its path as lines for a terminal.

    Args:
        store: Directory of the study.
        worker_hour: Price of a worker in US dollars per hour; by default the one in the study.

    Raises:
        SpecError: The packages that draw the report are not installed.
        RunError: The directory has no study, or its record is damaged.
    """
    with needs_extra("study"):
        from undula.study.render.page import publish
    spec = read_spec(store)
    if worker_hour is not None:
        spec = replace(spec, worker_hour=worker_hour)
    return publish(store, spec, list(read_progress(store, spec).records.values()))


def report_if_done(loaded: LoadedStudy, fresh: bool) -> list[str] | None:
    """Check a study before a cluster starts for it, and write its report if all of its trials have ended.

    Args:
        loaded: The study.
        fresh: Whether the study starts over.

    Returns:
        Lines for a terminal, or None if trials are left to train.

    Raises:
        UndulaError: The trials are invalid.
    """
    study = Study(loaded)
    progress = StudyProgress(study.spec) if fresh else read_progress(study.store, study.spec)
    study.check(progress.wanted(), fresh, knows_defaults=False)
    if not progress.is_done:
        return None
    with held(study.store):
        study.begin()
        ended = f"all {len(progress.records)} trials have ended; start over with --fresh"
        return [ended, "", *report_study(study.store), f"study directory: {study.url}"]
