"""Driver of a study. It checks the study, trains the remaining trials with Ray Tune, and writes the report."""

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from undula.driver.connection import connected, for_workers
from undula.driver.preflight import check_job, on_machines
from undula.driver.record import record_job
from undula.elastic.ray.cluster_gpus import offers_gpus
from undula.errors import FAILED, INTERRUPTED
from undula.plan.plan import Plan
from undula.report.text import counted
from undula.state.directory import held
from undula.state.heartbeat import keep_heartbeat, refuse_another_driver
from undula.study.job import Study
from undula.study.live_table import StudyScreen
from undula.study.load import load_study
from undula.study.process import TrialSpec
from undula.study.progress import StudyProgress, read_progress
from undula.study.records import TRIALS, delete_study, reset_failures
from undula.study.render.page import publish
from undula.study.sweep import sweep
from undula.study.trials import Trial
from undula.study.verdicts import early_rung_warning
from undula.telemetry.hub import start_hub
from undula.train.run import Run


def conduct(
    train: Callable[[Run], None], config: type | None, file: Path, overrides: Sequence[str], fresh: bool
) -> None:
    """Train the trials of a study that have not ended, and write the study's report.

    Args:
        train: Train function of the job's script.
        config: Dataclass of the script's own settings, if it has one.
        file: YAML of the study.
        overrides: Overrides of the study's values, as `key.sub=value`.
        fresh: Whether to delete the study and start over.

    Raises:
        UndulaError: The study or its job is invalid. Nothing has been trained then.
        SystemExit: A trial failed, or the driver was interrupted.
    """
    study = Study(load_study(file, overrides, config))
    check_job(study.base)
    with held(study.store):
        progress = StudyProgress(study.spec) if fresh else read_progress(study.store, study.spec)
        study.check(progress.wanted(), fresh)
        if progress.is_done:
            study.begin()
        else:
            with connected():
                _train(study, train, fresh)
        print("writing the report ...\n", flush=True)
        records = list(read_progress(study.store, study.spec).records.values())
        print("\n".join([*publish(study.store, study.spec, records), f"study directory: {study.url}"]), flush=True)
    if failed := sum(record.state == "failed" for record in records):
        print(f"{counted(failed, 'trial')} failed; run the same command to try again", flush=True)
        raise SystemExit(FAILED)


def _train(study: Study, train: Callable[[Run], None], fresh: bool) -> None:
    """Train the remaining trials of a study on the cluster."""
    if study.store.is_s3:  # there is no file lock on S3
        _hub = start_hub(study.store)  # its name keeps out a second driver on this cluster while this handle exists
        refuse_another_driver(study.store)
    study.base = on_machines(study.base, offers_gpus)
    train = for_workers(train)
    if fresh:
        delete_study(study.store)
    study.begin()
    if note := early_rung_warning(study.spec):
        print(f"note: the report will not cover {note[0].lower()}{note[1:]}", flush=True)
    progress = read_progress(study.store, study.spec)
    if failed := reset_failures(study.store, progress.records.values()):
        print(f"trying {counted(failed, 'failed trial')} again", flush=True)
        progress = read_progress(study.store, study.spec)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray would turn a SystemExit into another error
    try:
        with keep_heartbeat(study.store), StudyScreen(study.spec, progress.records) as screen:
            spec_of, workers = partial(_trial_spec, study), study.base.spec.workers
            sweep(study.store, progress, train, spec_of, workers, study.samples_at, screen.show)
    except KeyboardInterrupt:
        print(f"interrupted\nstudy directory: {study.url}\nrun the same command to continue", flush=True)
        raise SystemExit(INTERRUPTED) from None


def _trial_spec(study: Study, trial: Trial) -> TrialSpec:
    """Write the record of a trial's job to its run directory, and return the specification for its process."""
    loaded = study.job(trial)
    plan = Plan(loaded.spec.plan, study.rows)
    launch = record_job(loaded, plan, study.store / TRIALS / trial.name)
    return TrialSpec(launch, study.spec.metric, is_packed=study.spec.packed is not None)
