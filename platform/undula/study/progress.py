"""Progress of a study: the records of its trials, read from its directory and updated while it runs."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf

from undula.storage import Store
from undula.study.records import TRIALS, read_record
from undula.study.search import wanted
from undula.study.spec import StudySpec
from undula.study.trials import Trial, TrialRecord

READERS = 8
"""Maximum number of trials whose records are read at once."""


@dataclass
class StudyProgress:
    """Records of a study's trials. The driver updates them while the trials run."""

    spec: StudySpec
    records: dict[Trial, TrialRecord] = field(default_factory=dict)

    def losses(self) -> Mapping[Trial, float]:
        """Return the losses by which the search decides: those of the trials that have ended, except failed trials, which are repeated."""
        return {
            trial: record.loss if record.state == "complete" else inf
            for trial, record in self.records.items()
            if record.has_ended and record.state != "failed"
        }

    def firsts(self) -> Mapping[Trial, float]:
        """Return the first losses of complete and stopped trials. A trial whose loss stays above its first loss has learned nothing."""
        return {
            trial: record.curve[0].loss
            for trial, record in self.records.items()
            if record.state in ("complete", "stopped") and record.curve
        }

    @property
    def is_done(self) -> bool:
        """Whether no trial is left to train or repeat."""
        records = [self.records.get(trial) for trial in self.wanted()]
        return all(record and record.has_ended and record.state != "failed" for record in records)

    def wanted(self) -> tuple[Trial, ...]:
        """Return the trials that the search wants, given the losses so far."""
        return wanted(self.spec, self.losses(), self.firsts())


def read_progress(study: Store, spec: StudySpec) -> StudyProgress:
    """Read the records of all trials that the search wants, until their losses make it want no further ones.

    Args:
        study: Directory of the study.
        spec: The study.
    """

    def read(trial: Trial) -> TrialRecord:
        return read_record(study / TRIALS / trial.name, spec, trial)

    progress = StudyProgress(spec)
    with ThreadPoolExecutor(READERS, thread_name_prefix="undula-progress") as threads:
        while todo := [trial for trial in progress.wanted() if trial not in progress.records]:
            progress.records |= zip(todo, threads.map(read, todo), strict=True)
    return progress
