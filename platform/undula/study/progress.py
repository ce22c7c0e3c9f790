"""What is known of a study while it runs, and how that is read from its directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from undula.storage import Store
from undula.study.records import TRIALS, read_record
from undula.study.search import wanted
from undula.study.spec import StudySpec
from undula.study.trials import Trial, TrialRecord


@dataclass
class Progress:
    """What is known of a study's trials while they run."""

    spec: StudySpec
    records: dict[Trial, TrialRecord] = field(default_factory=dict)

    def losses(self) -> Mapping[Trial, float]:
        """Of those that have ended: what the search decides by. A trial that failed says nothing, and the search waits for it there."""
        return {
            trial: record.loss if record.state == "complete" else inf
            for trial, record in self.records.items()
            if record.has_ended and record.state != "failed"
        }

    def firsts(self) -> Mapping[Trial, float]:
        """The first losses of those that were not lost to an error or to divergence: without falling below them, nothing was learned."""
        return {
            trial: record.curve[0].loss
            for trial, record in self.records.items()
            if record.state in ("complete", "stopped") and record.curve
        }

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to train, nor to try again."""
        records = [self.records.get(trial) for trial in self.wanted()]
        return all(record and record.has_ended and record.state != "failed" for record in records)

    def wanted(self) -> tuple[Trial, ...]:
        return wanted(self.spec, self.losses(), self.firsts())


def known(study: Store, spec: StudySpec) -> Progress:
    """What a study's directory says of the trials that are wanted, and of those that these make wanted."""
    progress = Progress(spec)
    while todo := [trial for trial in progress.wanted() if trial not in progress.records]:
        progress.records |= {trial: read_record(study / TRIALS / trial.name, spec, trial) for trial in todo}
    return progress
