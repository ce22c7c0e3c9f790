"""A study from its first line to its last: spec -> trials -> Ray Tune -> report."""

import json
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from undula.data.mixture import load_data
from undula.driver import INTERRUPTED, connected, ship_modules_beside_the_script
from undula.elastic.fleet import Work
from undula.errors import RunError, SpecError
from undula.plan.plan import Plan
from undula.preflight import changed_key, check_job, describe
from undula.run.hub import start_hub
from undula.run.loop import Run
from undula.spec import LoadedSpec, LoadedStudy, as_tree, load_study
from undula.state.directory import JOB_FILE, held, identity, job_record
from undula.storage import open_store
from undula.study.live_table import StudyScreen
from undula.study.page import verdict_lines, write_report
from undula.study.process import Order
from undula.study.progress import Progress, known
from undula.study.records import TRIALS, forget_failures, forget_study, write_study
from undula.study.sweep import sweep
from undula.study.trials import Trial


class Study:
    """A study and its job, with everything that the job decides where the study is silent."""

    def __init__(self, loaded: LoadedStudy):
        self._loaded = loaded
        self.base = loaded.job
        """With the study's overrides."""
        job = loaded.job.spec
        self.rows = load_data(job.data).num_rows
        plan = Plan(job.plan, self.rows)
        samples = loaded.spec.samples or plan.total_samples
        warmups = loaded.spec.warmups or (round(job.schedule.over(plan).warmup_samples),)
        self.spec = replace(loaded.spec, samples=samples, warmups=warmups)
        self.url = f"{job.runs.rstrip('/')}/{loaded.spec.name}"
        self.store = open_store(self.url)
        self.hub: Any = None
        """That says to others that the study is under way, for as long as it is kept."""

    def job(self, trial: Trial) -> LoadedSpec:
        """The job of a trial: `undula run` with the same values trains the same."""
        return self._loaded.job_with(self.values(trial))

    def plan(self, batch: int) -> Plan:
        """Of a trial with such a batch, without its end."""
        spec = replace(self.base.spec.plan, global_batch=batch, epochs=2**40, max_steps=None)
        return Plan(spec, self.rows)

    def samples_at(self, trial: Trial, step: int) -> int:
        """That a trial has consumed after so many steps."""
        return self.plan(trial.batch).step(step).samples_before

    def values(self, trial: Trial) -> dict[str, Any]:
        """What a trial has in place of the job's values, by dotted key."""
        spec, job, plan = self.spec, self.base.spec, self.plan(trial.batch)
        assert spec.samples is not None
        epochs, rest = divmod(spec.samples, plan.samples_per_epoch)
        steps = max(epochs * plan.steps_per_epoch + -(-rest // trial.batch), 1)
        scale = job.plan.global_batch / trial.batch
        values: dict[str, Any] = {
            "name": trial.name,
            "runs": f"{self.url}/{TRIALS}",
            "plan.global_batch": trial.batch,
            "plan.seed": trial.seed,
            "plan.epochs": -(-steps // plan.steps_per_epoch),
            "plan.max_steps": steps,
            "schedule.base_lr": trial.base_lr,
            "schedule.base_batch": spec.batches[0],
            "schedule.batch_rule": trial.rule,
            "schedule.warmup_samples": trial.warmup,
            "schedule.warmup_epochs": None,
            "schedule.warmup_steps": None,
            "validation.every_steps": max(round(spec.samples / spec.measurements / trial.batch), 1),
            "checkpoint.every_steps": max(round(job.checkpoint.every_steps * scale), 1),
            "checkpoint.keep": 1,
        }
        if spec.metric == "training_loss":
            values["data.validation"] = None
        if trial.optimizer != "own":
            values["config.optimizer.name"] = trial.optimizer
        return values

    def order(self, trial: Trial) -> Order:
        """What the process of a trial is told; its run directory says what it is."""
        loaded = self.job(trial)
        store = self.store / TRIALS / trial.name
        plan = Plan(loaded.spec.plan, self.rows)
        record = {**describe(loaded, plan), **identity(store)}
        store.write(JOB_FILE, json.dumps(record, indent=1).encode())
        return Order(
            job=replace(loaded.job(), run_id=record["id"]),
            workers=loaded.spec.workers,
            horovod=loaded.spec.horovod if loaded.spec.engine == "horovod" else None,
            metric=self.spec.metric,
            is_packed=self.spec.packed is not None,
            work=Work(plan.total_steps, record["began"]),
        )

    def check(self, trials: Iterable[Trial]) -> None:
        """What can be known to be wrong with trials. Those that are there must be what they were begun as; axes may become longer.

        Raises:
            SpecError: the job refuses a trial's values.
            RunError: the first key that has another value than in a trial that is there.
        """
        for trial in trials:
            loaded, record = self.job(trial), job_record(self.store / TRIALS / trial.name)
            plan = Plan(loaded.spec.plan, self.rows)
            if (warmup := loaded.spec.schedule.over(plan).warmup_samples) > plan.total_samples:
                raise SpecError(
                    f"{trial.name} would warm up for {warmup:,.0f} samples and train for {plan.total_samples:,}, so that it never had "
                    "its learning rate: give smaller warmups, or more samples"
                )
            if record and (change := changed_key(record["spec"], loaded.tree())):
                key, before, now = change
                raise RunError(
                    f"{self.url} has trained {trial.name} with {key} {json.dumps(before)}, and it is {json.dumps(now)} now: "
                    "restore it, give the study another name, or start over with --fresh"
                )


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
        if study.store.exists(JOB_FILE):
            raise RunError(f"{study.url} is a run's directory: give the study another name")
        if fresh:
            forget_study(study.store)
        progress = known(study.store, study.spec)
        study.check(progress.records)
        with connected():
            _train(study, progress, train)
        print("drawing the report ...", flush=True)
        records = list(known(study.store, study.spec).records.values())
        page = write_report(study.store, study.spec, records)
        print(
            "\n".join(
                ["", *verdict_lines(study.spec, records), "", f"report: {page}", f"study directory: {study.url}"]
            ),
            flush=True,
        )


def _train(study: Study, progress: Progress, train: Callable[[Run], None]) -> None:
    if study.store.is_s3:  # which has no lock of its own: two drivers would train the same trials
        study.hub = start_hub(study.store)
    ship_modules_beside_the_script()
    if failed := forget_failures(study.store, progress.records.values()):
        print(f"{failed} trial{'s' if failed > 1 else ''} that failed: tried again", flush=True)
        progress = known(study.store, study.spec)
    write_study(study.store, {"spec": as_tree(study.spec), "job": study.base.tree()})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray makes an error of its own of a SystemExit
    try:
        with StudyScreen(study.spec, progress.records) as screen:
            sweep(study.store, progress, train, study.order, study.base.spec.workers, study.samples_at, screen.tell)
    except KeyboardInterrupt:
        print(f"stopped from outside\nstudy directory: {study.url}\nthe same command goes on", flush=True)
        raise SystemExit(INTERRUPTED) from None
