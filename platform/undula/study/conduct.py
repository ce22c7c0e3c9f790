"""A study from its first line to its last: spec -> trials -> Ray Tune -> report."""

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from undula.driver.connection import INTERRUPTED, connected, ship_modules_beside_the_script
from undula.driver.preflight import check_job, describe
from undula.elastic.pure.fleet import Work
from undula.plan.plan import Plan
from undula.report.text import counted
from undula.state.directory import JOB_FILE, held, identity
from undula.study.job import Study
from undula.study.live_table import StudyScreen
from undula.study.load import load_study
from undula.study.process import Order
from undula.study.progress import Progress, known
from undula.study.records import TRIALS, forget_failures, forget_study
from undula.study.render.page import publish
from undula.study.sweep import sweep
from undula.study.trials import Trial
from undula.study.under_way import refuse_another_driver, said_under_way
from undula.study.verdicts import early_rung_warning
from undula.telemetry.hub import start_hub
from undula.train.run import Run


def conduct(
    train: Callable[[Run], None], config: type | None, file: Path, overrides: Sequence[str], fresh: bool
) -> None:
    """Train what is left of a study's trials, and write its report.

    Raises:
        UndulaError: one sentence for what is wrong, before anything is trained.
    """
    study = Study(load_study(file, overrides, config))
    check_job(study.base)
    with held(study.store):
        progress = Progress(study.spec) if fresh else known(study.store, study.spec)
        study.check(progress.wanted(), fresh)
        if progress.is_done:
            study.begin()
        else:
            with connected():
                _train(study, train, fresh)
        print("drawing the report ...\n", flush=True)
        records = list(known(study.store, study.spec).records.values())
        print("\n".join([*publish(study.store, study.spec, records), f"study directory: {study.url}"]), flush=True)
    if failed := sum(record.state == "failed" for record in records):
        print(f"{counted(failed, 'trial')} failed: the same command tries them again", flush=True)
        raise SystemExit(1)


def _train(study: Study, train: Callable[[Run], None], fresh: bool) -> None:
    if study.store.is_s3:  # which has no lock of its own
        _hub = start_hub(study.store)  # kept, as its name refuses a second driver of this cluster
        refuse_another_driver(study.store)
    ship_modules_beside_the_script()
    if fresh:
        forget_study(study.store)
    study.begin()
    if note := early_rung_warning(study.spec):
        print(f"note: the report will not tell of {note[0].lower()}{note[1:]}", flush=True)
    progress = known(study.store, study.spec)
    if failed := forget_failures(study.store, progress.records.values()):
        print(f"{failed} trial{'s' if failed > 1 else ''} that failed: tried again", flush=True)
        progress = known(study.store, study.spec)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray makes an error of its own of a SystemExit
    try:
        with said_under_way(study.store), StudyScreen(study.spec, progress.records) as screen:
            order, workers = partial(_order, study), study.base.spec.workers
            sweep(study.store, progress, train, order, workers, study.samples_at, screen.tell)
    except KeyboardInterrupt:
        print(f"stopped from outside\nstudy directory: {study.url}\nthe same command goes on", flush=True)
        raise SystemExit(INTERRUPTED) from None


def _order(study: Study, trial: Trial) -> Order:
    """What the process of a trial is told; its run directory says what it is."""
    loaded = study.job(trial)
    store = study.store / TRIALS / trial.name
    plan = Plan(loaded.spec.plan, study.rows)
    record = {**describe(loaded, plan), **identity(store)}
    store.write(JOB_FILE, json.dumps(record, indent=1).encode())
    return Order(
        job=replace(loaded.job(), run_id=record["id"]),
        workers=loaded.spec.workers,
        horovod=loaded.spec.horovod if loaded.spec.engine == "horovod" else None,
        metric=study.spec.metric,
        is_packed=study.spec.packed is not None,
        work=Work(plan.total_steps, record["began"]),
    )
