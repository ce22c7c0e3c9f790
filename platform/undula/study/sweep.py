"""Study under Ray Tune: the choice of the next trial, early stopping, and the record of each trial while it trains."""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from time import monotonic
from typing import Any, assert_never

import ray
from ray import tune
from ray.tune import TuneError
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from undula.elastic.pure.spec import WorkersSpec
from undula.errors import StorageError
from undula.storage import Store
from undula.study.process import TrialProcess, TrialSpec, resources
from undula.study.progress import StudyProgress
from undula.study.records import TRIALS, read_record, write_outcome
from undula.study.spec import StudySpec
from undula.study.trials import Measurement, State, Trial, TrialRecord
from undula.train.run import Run

MAX_LOST_PROCESSES = 10
"""Maximum number of processes that a trial may lose. Processes on preempted nodes do not count if Ray got a notice."""
UNLIMITED = 10**6
"""Maximum number of concurrent trials if the study sets none."""
MIN_PENDING_TRIALS = 16
"""Minimum number of pending trials, so that an autoscaler sees the demand and several processes can start at once."""
TUNE = {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Environment variables of Tune. A study resumes from its run directories and not from Tune's checkpoints. With Tune's handler of SIGINT,
an interrupted study would return as if it had finished."""


def sweep(
    study: Store,
    progress: StudyProgress,
    train: Callable[[Run], None],
    spec_of: Callable[[Trial], TrialSpec],
    workers: WorkersSpec,
    samples_at: Callable[[Trial, int], int],
    on_change: Callable[[TrialRecord], None],
) -> None:
    """Train the trials of a study that have not ended.

    Args:
        study: Directory of the study.
        progress: Records of the trials, which this function updates.
        train: Train function of the script.
        spec_of: Function that returns the specification of a trial for its process. It is called once for each trial.
        workers: Workers of the job.
        samples_at: Function that returns the number of samples that a trial has consumed after a number of steps.
        on_change: Callback that receives each record that changes.

    Raises:
        StorageError: The ledger of a trial cannot be read, or its outcome cannot be written.
    """
    spec = progress.spec
    given = _GivenTrials(progress, spec_of)
    recorder = _Recorder(study, progress, given.by_id, samples_at, on_change)
    halving = _halving(progress, given.by_id, samples_at)
    for record in halving.to_stop if halving else ():
        recorder.end(record)
    cpus = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    os.environ.update({**TUNE, "TUNE_MAX_PENDING_TRIALS_PG": str(max(MIN_PENDING_TRIALS, int(cpus)))})
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # the recorder already reports lost processes
    trainable = tune.with_resources(
        tune.with_parameters(TrialProcess, train=train), dict(resources(workers, spec.packed))
    )
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                num_samples=-1,
                search_alg=_NextWanted(given, _max_at_once(spec, workers)),
                scheduler=halving,
                reuse_actors=spec.packed is not None,
                metric="loss",
                mode="min",
            ),
            run_config=tune.RunConfig(
                name=spec.name,
                storage_path=folder,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # a run has its own checkpoints
                failure_config=tune.FailureConfig(max_failures=MAX_LOST_PROCESSES),
                callbacks=[recorder],
                verbose=0,
            ),
        )
        try:
            tuner.fit()
        except TuneError:  # whose message is a traceback
            if recorder.failure:
                raise recorder.failure from None
            raise


def _max_at_once(spec: StudySpec, workers: WorkersSpec) -> Callable[[], int]:
    """Return a function that returns the maximum number of concurrent trials on the current cluster.

    Ray places packed trials by their resources. A trial with its own workers needs the resources of all its workers.
    """

    def max_at_once() -> int:
        if spec.packed is not None:
            return spec.max_concurrent or UNLIMITED
        cluster = ray.cluster_resources()  # type: ignore[no-untyped-call]
        amounts = workers.per_worker.items()
        trials = (cluster.get(name, 0.0) / (amount * workers.max) for name, amount in amounts if amount)
        fits = min((int(share + 1e-9) for share in trials), default=1)
        return min(
            max(fits, 1), spec.max_concurrent or UNLIMITED
        )  # while the cluster is too small, one trial waits for it to grow

    return max_at_once


class _GivenTrials:
    """Trials that were given to Tune, by Tune's ids."""

    def __init__(self, progress: StudyProgress, spec_of: Callable[[Trial], TrialSpec]):
        self.progress = progress
        self.spec_of = spec_of
        self.by_id: dict[str, Trial] = {}

    def next(self) -> Trial | None:
        """Return the first wanted trial that has not ended and was not given to Tune, or None."""
        given = set(self.by_id.values())
        for trial in self.progress.wanted():
            record = self.progress.records.get(trial)
            if trial not in given and not (record and record.has_ended):
                return trial
        return None

    @property
    def running(self) -> int:
        """Number of trials given to Tune that have not ended."""
        return sum(not self.progress.records[trial].has_ended for trial in self.by_id.values())


class _Unsaved:
    """Base of objects of which Tune saves nothing, because a study resumes from its run directories."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _NextWanted(_Unsaved, Searcher):
    """Tune searcher that suggests the next trial that the study wants, if another one may run.

    Args:
        given: Trials that were given to Tune.
        max_at_once: Function that returns the maximum number of concurrent trials.
    """

    def __init__(self, given: _GivenTrials, max_at_once: Callable[[], int]):
        super().__init__(metric="loss", mode="min")
        self._given = given
        self._max_at_once = max_at_once

    def suggest(self, trial_id: str) -> Any:
        trial = self._given.next()
        if trial is None:
            return None if self._given.running else Searcher.FINISHED
        if self._given.running >= self._max_at_once():
            return None
        records = self._given.progress.records
        records[trial] = replace(records.get(trial) or TrialRecord(trial, "waiting", trial.base_lr), state="waiting")
        self._given.by_id[trial_id] = trial
        # The specification is sent as bytes. If Tune unpickled it in this process, cloudpickle would damage the classes of the script.
        return {"spec": ray.cloudpickle.dumps(self._given.spec_of(trial))}  # type: ignore[no-untyped-call]

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Do nothing, because the recorder handles the result."""

    def save(self, checkpoint_path: str) -> None:
        """Do nothing, because `read_progress` reads the state of the study."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing, because `save` saves nothing."""


class _Recorder(_Unsaved, tune.Callback):
    """Callback of Tune that updates the records, and writes the outcome of each trial that ends."""

    def __init__(
        self,
        study: Store,
        progress: StudyProgress,
        by_id: Mapping[str, Trial],
        samples_at: Callable[[Trial, int], int],
        on_change: Callable[[TrialRecord], None],
    ):
        self._study, self._progress, self._by_id = study, progress, by_id
        self._samples_at, self._on_change = samples_at, on_change
        self._began: dict[Trial, float] = {}
        self.failure: StorageError | None = None
        """Error with which writing the last outcome failed."""

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        this = self._by_id[trial.trial_id]
        self._began.setdefault(this, monotonic())
        self._set(replace(self._progress.records[this], state="running"))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        this = self._by_id[trial.trial_id]
        record = self._progress.records[this]
        if result["is_measured"]:
            point = Measurement(self._samples_at(this, result["step"]), result["step"], result["loss"])
            record = replace(record, curve=(*(earlier for earlier in record.curve if earlier.step < point.step), point))
        self._set(replace(record, seconds=monotonic() - self._began[this]))

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        result, record = trial.last_result, self._progress.records[self._by_id[trial.trial_id]]
        state: State = result["state"] if result["state"] != "running" else "stopped"
        self.end(replace(record, state=state, message=result["message"]))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        record = self._progress.records[self._by_id[trial.trial_id]]
        if trial.status == "ERROR":  # Tune also calls this before it repeats a trial
            cause = (str(trial.get_error() or "").strip().splitlines() or ["unknown cause"])[-1]
            self.end(replace(record, state="failed", message=f"its process was lost too often; last cause: {cause}"))

    def end(self, record: TrialRecord) -> None:
        """Write the outcome of a trial, from its ledger with the steps of former processes, and the last measurements of this process.

        Raises:
            StorageError: The ledger cannot be read, or the outcome cannot be written.
        """
        self.failure = None
        try:
            self._end(record)
        except StorageError as error:
            self.failure = error
            raise

    def _end(self, record: TrialRecord) -> None:
        store, heard = self._study / TRIALS / record.trial.name, record.curve
        stored = read_record(store, self._progress.spec, record.trial)
        curve = {point.step: point for point in (*heard, *stored.curve)}
        # A stopped trial may have made one more measurement before it left.
        last = heard[-1].step if heard and record.state == "stopped" else inf
        points = tuple(curve[step] for step in sorted(curve) if step <= last)
        ended = replace(stored, state=record.state, message=record.message, curve=points)
        if ended.state in ("complete", "stopped") and ended.has_diverged:
            ended = replace(ended, state="diverged", message=_divergence([point.loss for point in points]))
        write_outcome(store, ended, self._progress.spec.keep_models)
        self._set(ended)

    def _set(self, record: TrialRecord) -> None:
        self._progress.records[record.trial] = record
        self._on_change(record)


def _divergence(losses: list[float]) -> str:
    """Return the message of a trial that diverged with these losses."""
    odd = next((loss for loss in losses if not isfinite(loss)), None)
    return f"its loss went from {losses[0]:.4g} to {losses[-1]:.4g}" if odd is None else f"its loss was {odd}"


def _halving(
    progress: StudyProgress, by_id: Mapping[str, Trial], samples_at: Callable[[Trial, int], int]
) -> "_SuccessiveHalving | None":
    """Return the scheduler that stops trials early; None if the study stops none."""
    scheduler = progress.spec.scheduler
    match scheduler:
        case "asha":
            return _SuccessiveHalving(progress, by_id, samples_at)
        case "none":
            return None
        case _:
            assert_never(scheduler)


class _SuccessiveHalving(_Unsaved, FIFOScheduler):
    """Tune's ASHA with rungs in samples. Only trials that differ in nothing but their learning rate share rungs.

    The measurements of former trials are replayed first, so that a study that was killed resumes with the same rungs.
    """

    def __init__(self, progress: StudyProgress, by_id: Mapping[str, Trial], samples_at: Callable[[Trial, int], int]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._spec, self._by_id, self._samples_at = progress.spec, by_id, samples_at
        self._cells: dict[Any, AsyncHyperBandScheduler] = {}
        self.to_stop: list[TrialRecord] = []
        """Trials that ASHA would have stopped if the study had not been killed."""
        for record in progress.records.values():
            self._replay(record)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        this = self._by_id[trial.trial_id]
        self._cell(this).on_trial_add(tune_controller, _TrialId(this.name))  # type: ignore[arg-type]

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Any) -> str:
        this = self._by_id[trial.trial_id]
        if result["done"] or not result["is_measured"] or not result["step"]:
            return str(TrialScheduler.CONTINUE)
        samples = self._samples_at(this, result["step"])
        measured = _result(samples, result["loss"])
        answer = self._cell(this).on_trial_result(tune_controller, _TrialId(this.name), measured)  # type: ignore[arg-type]
        return str(TrialScheduler.CONTINUE if self._is_last(samples) else answer)

    def _replay(self, record: TrialRecord) -> None:
        """Replay the measurements of a former trial in ASHA."""
        trial_id, cell = _TrialId(record.trial.name), self._cell(record.trial)
        cell.on_trial_add(None, trial_id)  # type: ignore[arg-type]
        answer: Any = TrialScheduler.CONTINUE
        for point in record.curve:
            answer = cell.on_trial_result(None, trial_id, _result(point.samples, point.loss))  # type: ignore[arg-type]
        # Only the answer to the newest measurement counts. When the earlier ones were made, ASHA had fewer trials to compare with.
        if answer == TrialScheduler.STOP and not record.has_ended and not self._is_last(record.samples):
            self.to_stop.append(replace(record, state="stopped"))

    def _is_last(self, samples: int) -> bool:
        """Return whether a trial is at its end. ASHA must not stop it there, even if the last rung is at the end."""
        assert self._spec.samples is not None
        return samples >= self._spec.samples

    def _cell(self, trial: Trial) -> AsyncHyperBandScheduler:
        """Return the scheduler of the trials that differ from this one only in their learning rate."""
        key = replace(trial, base_lr=0.0)
        if key not in self._cells:
            assert self._spec.samples is not None
            assert self._spec.rung is not None
            self._cells[key] = AsyncHyperBandScheduler(
                time_attr="samples",
                metric="loss",
                mode="min",
                max_t=self._spec.samples,
                grace_period=self._spec.rung,
                reduction_factor=self._spec.rung_ratio,
                stop_last_trials=False,
            )
        return self._cells[key]


@dataclass(frozen=True)
class _TrialId:
    """Stand-in for a Tune trial, with the only attribute that ASHA reads."""

    trial_id: str


def _result(samples: int, loss: float) -> dict[str, float]:
    """Return a Tune result with the two values that ASHA reads."""
    return {"samples": samples, "loss": loss}
