"""A study under Ray Tune: which trial starts next, which are stopped, and what is known of each meanwhile."""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from time import monotonic
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from undula.elastic.pure.spec import WorkersSpec
from undula.storage import Store
from undula.study.process import Order, TrialProcess, resources
from undula.study.progress import Progress
from undula.study.records import TRIALS, read_record, write_outcome
from undula.study.spec import StudySpec
from undula.study.trials import Measurement, State, Trial, TrialRecord
from undula.train.run import Run

LOST_PROCESSES = 10
"""Times that a trial's process may be lost; nodes that Ray knows to have been preempted do not count."""
MANY = 10**6
ASKED_FOR = 16
"""Trials at least that Ray knows to be waiting, so that a cluster which can grow does, and several of their processes start at once."""
TUNE = {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Tune's own notes of a study are not what it goes on from; and after a SIGINT it would return as if the study were done."""


def sweep(
    study: Store,
    progress: Progress,
    train: Callable[[Run], None],
    order: Callable[[Trial], Order],
    workers: WorkersSpec,
    samples_at: Callable[[Trial, int], int],
    tell: Callable[[TrialRecord], None],
) -> None:
    """Train what is left of a study.

    Args:
        study: its directory.
        progress: what is known; kept up to date.
        train: the script's function.
        order: what a trial's process is told; called once a trial.
        workers: of the job.
        samples_at: samples that a trial has consumed after so many steps.
        tell: called with each trial's record as it changes.
    """
    spec = progress.spec
    started = _Started(progress, order)
    keeper = _Keeper(study, progress, started.by_id, samples_at, tell)
    halving = _Halving(progress, started.by_id, samples_at) if spec.scheduler == "asha" else None
    for record in halving.lost if halving else ():
        keeper.end(record)
    cpus = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    os.environ.update({**TUNE, "TUNE_MAX_PENDING_TRIALS_PG": str(max(ASKED_FOR, int(cpus)))})
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # the keeper tells of lost processes
    trainable = tune.with_resources(
        tune.with_parameters(TrialProcess, train=train), dict(resources(workers, spec.packed))
    )
    with tempfile.TemporaryDirectory() as folder:
        tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                num_samples=-1,
                search_alg=_NextWanted(started, _room(spec, workers)),
                scheduler=halving,
                reuse_actors=spec.packed is not None,
                metric="loss",
                mode="min",
            ),
            run_config=tune.RunConfig(
                name=spec.name,
                storage_path=folder,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # a run has its own
                failure_config=tune.FailureConfig(max_failures=LOST_PROCESSES),
                callbacks=[keeper],
                verbose=0,
            ),
        ).fit()


def _room(spec: StudySpec, workers: WorkersSpec) -> Callable[[], int]:
    """How many trials may run at once. Packed ones Ray places itself; elastic ones each take what their workers do."""

    def room() -> int:
        if spec.packed is not None:
            return spec.max_concurrent or MANY
        has = ray.cluster_resources()  # type: ignore[no-untyped-call]
        each = {"CPU": workers.cpus, "GPU": workers.gpus, **workers.resources}
        trials = (has.get(name, 0.0) / (amount * workers.max) for name, amount in each.items() if amount)
        fits = min((int(share + 1e-9) for share in trials), default=1)
        return min(max(fits, 1), spec.max_concurrent or MANY)  # one waits for a cluster that has too little yet

    return room


class _Started:
    """The trials that Tune has been given, by Tune's names for them."""

    def __init__(self, progress: Progress, order: Callable[[Trial], Order]):
        self.progress = progress
        self.order = order
        self.by_id: dict[str, Trial] = {}

    def next(self) -> Trial | None:
        given = set(self.by_id.values())
        for trial in self.progress.wanted():
            record = self.progress.records.get(trial)
            if trial not in given and not (record and record.has_ended):
                return trial
        return None

    @property
    def running(self) -> int:
        return sum(not self.progress.records[trial].has_ended for trial in self.by_id.values())


class _Unsaved:
    """Tune saves what it is given, to go on from; ours goes on from the run directories."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _NextWanted(_Unsaved, Searcher):
    """Gives Tune the next trial that the study wants and has room for."""

    def __init__(self, started: _Started, room: Callable[[], int]):
        super().__init__(metric="loss", mode="min")
        self._started = started
        self._room = room

    def suggest(self, trial_id: str) -> Any:
        trial = self._started.next()
        if trial is None:
            return None if self._started.running else Searcher.FINISHED
        if self._started.running >= self._room():
            return None
        records = self._started.progress.records
        records[trial] = replace(records.get(trial) or TrialRecord(trial, "waiting", trial.base_lr), state="waiting")
        self._started.by_id[trial_id] = trial
        # As bytes: a script's own classes must not be unpickled here, where cloudpickle would damage the ones that are in use.
        order = ray.cloudpickle.dumps(self._started.order(trial))  # type: ignore[no-untyped-call]
        return {"order": order}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """The keeper knows."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: `known` reads where the study stands."""

    def restore(self, checkpoint_path: str) -> None:
        """Never called."""


class _Keeper(_Unsaved, tune.Callback):
    """Keeps the records up to date, and writes down how each trial ended."""

    def __init__(
        self,
        study: Store,
        progress: Progress,
        by_id: Mapping[str, Trial],
        samples_at: Callable[[Trial, int], int],
        tell: Callable[[TrialRecord], None],
    ):
        self._study, self._progress, self._by_id = study, progress, by_id
        self._samples_at, self._tell = samples_at, tell
        self._began: dict[Trial, float] = {}

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        this = self._by_id[trial.trial_id]
        self._began.setdefault(this, monotonic())
        self._now(replace(self._progress.records[this], state="running"))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        this = self._by_id[trial.trial_id]
        record = self._progress.records[this]
        if result["is_measured"]:
            point = Measurement(self._samples_at(this, result["step"]), result["step"], result["loss"])
            record = replace(record, curve=(*(each for each in record.curve if each.step < point.step), point))
        self._now(replace(record, seconds=monotonic() - self._began[this]))

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        result, record = trial.last_result, self._progress.records[self._by_id[trial.trial_id]]
        state: State = result["state"] if result["state"] != "running" else "stopped"
        self.end(replace(record, state=state, message=result["message"]))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        record = self._progress.records[self._by_id[trial.trial_id]]
        if trial.status == "ERROR":  # and not one that is tried again
            cause = (str(trial.get_error() or "").strip().splitlines() or ["no more is known"])[-1]
            self.end(replace(record, state="failed", message=f"its process was lost too often, at last by: {cause}"))

    def end(self, record: TrialRecord) -> None:
        """Write down that a trial has ended, with what its ledger knows of former processes and what this one has heard beside it."""
        store, known = self._study / TRIALS / record.trial.name, record.curve
        found = read_record(store, self._progress.spec, record.trial)
        curve = {point.step: point for point in (*known, *found.curve)}
        last = known[-1].step if known and record.state == "stopped" else inf  # it may have measured once more
        points = tuple(curve[step] for step in sorted(curve) if step <= last)
        ended = replace(found, state=record.state, message=record.message, curve=points)
        if ended.state in ("complete", "stopped") and ended.has_diverged:
            losses = [point.loss for point in ended.curve]
            odd = next((loss for loss in losses if not isfinite(loss)), None)
            told = f"its loss went from {losses[0]:.4g} to {losses[-1]:.4g}" if odd is None else f"its loss was {odd}"
            ended = replace(ended, state="diverged", message=told)
        write_outcome(store, ended, self._progress.spec.keep_models)
        self._now(ended)

    def _now(self, record: TrialRecord) -> None:
        self._progress.records[record.trial] = record
        self._tell(record)


class _Halving(_Unsaved, FIFOScheduler):
    """Tune's ASHA with rungs in samples, one for each set of trials that differ in the learning rate alone.

    What is known of former trials goes through it first, so that a study that was killed goes on with the same rungs.
    """

    def __init__(self, progress: Progress, by_id: Mapping[str, Trial], samples_at: Callable[[Trial, int], int]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._spec, self._by_id, self._samples_at = progress.spec, by_id, samples_at
        self._cells: dict[Any, AsyncHyperBandScheduler] = {}
        self.lost: list[TrialRecord] = []
        """Trials that would have been stopped, had the study not been killed just then."""
        for record in progress.records.values():
            stand_in = _StandIn(record.trial.name)
            self._cell(record.trial).on_trial_add(None, stand_in)  # type: ignore[arg-type]
            for number, point in enumerate(record.curve):
                told = _result(point.samples, point.loss)
                answer = self._cell(record.trial).on_trial_result(None, stand_in, told)  # type: ignore[arg-type]
                # Where the curve goes on, it was let on: others came to the rung later then, and come sooner now.
                is_newest = number == len(record.curve) - 1
                if (
                    answer == TrialScheduler.STOP
                    and is_newest
                    and not record.has_ended
                    and not self._is_last(point.samples)
                ):
                    self.lost.append(replace(record, state="stopped"))

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        this = self._by_id[trial.trial_id]
        self._cell(this).on_trial_add(tune_controller, _StandIn(this.name))  # type: ignore[arg-type]

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Any) -> str:
        this = self._by_id[trial.trial_id]
        if result["done"] or not result["is_measured"] or not result["step"]:
            return str(TrialScheduler.CONTINUE)
        samples = self._samples_at(this, result["step"])
        told = _result(samples, result["loss"])
        answer = self._cell(this).on_trial_result(tune_controller, _StandIn(this.name), told)  # type: ignore[arg-type]
        return str(TrialScheduler.CONTINUE if self._is_last(samples) else answer)

    def _is_last(self, samples: int) -> bool:
        """Whether a trial is at its end, where the last rung may be: it is complete, and no longer one to stop."""
        assert self._spec.samples is not None
        return samples >= self._spec.samples

    def _cell(self, trial: Trial) -> AsyncHyperBandScheduler:
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
class _StandIn:
    """All that ASHA looks at of a trial."""

    trial_id: str


def _result(samples: int, loss: float) -> dict[str, float]:
    return {"samples": samples, "loss": loss}
