"""Study with its job: the job of each trial, and the checks before anything starts."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from undula.config.job import LoadedSpec, as_tree, changed_key
from undula.config.secrets import hide_secrets
from undula.data.stored.mixture import load_data
from undula.errors import ManifestError, RunError, SpecError, StorageError
from undula.plan.plan import Plan
from undula.state.directory import JOB_FILE, STUDY_FILE, job_record
from undula.storage import open_store
from undula.study.load import LoadedStudy
from undula.study.records import TRIALS, read_spec, write_study
from undula.study.trials import Trial


class Study:
    """Study and its job, which provides every value that the study does not set.

    Raises:
        UndulaError: The data of the job cannot be read or do not fit its plan.
    """

    def __init__(self, loaded: LoadedStudy):
        self._loaded = loaded
        self.base = loaded.job
        """Job with the study's overrides."""
        job = loaded.job.spec
        if job.data.is_of_script:
            raise SpecError(
                f"{loaded.where(['job'])}: {loaded.file} has no data.train or data.mix, which a study needs to plan its trials; write the "
                "samples as Parquet with `undula data convert` and set data.train"
            )
        try:
            self.rows = load_data(job.data).num_rows
        except (StorageError, ManifestError) as error:
            key = "data.mix" if job.data.mix else "data.train"
            raise type(error)(f"{loaded.job.origin(key)}: {key}: {error}") from error
        plan = Plan(job.plan, self.rows)
        samples = loaded.spec.samples or plan.total_samples
        warmups = loaded.spec.warmups or (round(job.schedule.over(plan).warmup_samples),)
        self.spec = replace(loaded.spec, samples=samples, warmups=warmups)
        self.url = f"{job.runs.rstrip('/')}/{loaded.spec.name}"
        self.store = open_store(self.url)

    def job(self, trial: Trial) -> LoadedSpec:
        """Return the job of a trial. `undula run` with the values of this job trains the same model."""
        return self._loaded.job_with(self.values(trial)).with_workers(self.base.spec.workers)

    def plan(self, batch: int) -> Plan:
        """Return the plan of a trial with this batch. The plan has no end."""
        spec = replace(self.base.spec.plan, global_batch=batch, epochs=2**40, max_steps=None)
        return Plan(spec, self.rows)

    def samples_at(self, trial: Trial, step: int) -> int:
        """Return the number of samples that a trial has consumed after `step` steps."""
        return self.plan(trial.batch).step(step).samples_before

    def values(self, trial: Trial) -> dict[str, Any]:
        """Return the values of a trial that replace those of the job, by dotted key."""
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
            "checkpoint.max_non_finite_steps": None,  # the trial ends as diverged
        }
        if spec.metric == "training_loss":
            values["data.validation"] = None
        if trial.optimizer != "own":
            values["config.optimizer.name"] = trial.optimizer
        return values

    def begin(self) -> None:
        """Write study.json, which has the study in its current form."""
        write_study(self.store, {"spec": hide_secrets(as_tree(self.spec)), "job": self.base.tree()})

    def check(self, trials: Iterable[Trial], fresh: bool = False, knows_defaults: bool = True) -> None:
        """Check trials before they start. Trials can be added to a study, but a trial that has started cannot change.

        Args:
            trials: The trials.
            fresh: Whether the study will be deleted first, so that its former trials are irrelevant.
            knows_defaults: Whether the job's `config` includes the script's defaults. If not, only the keys in the YAML are compared.

        Raises:
            SpecError: The job does not accept the values of a trial.
            RunError: The directory is that of a run, or a key differs from the study or trial that has started.
        """
        if self.store.exists(JOB_FILE):
            raise RunError(f"{self.url} is the directory of a run; give the study another name")
        first, samples = self.spec.first_rung, self.spec.samples or 0
        if first and first > samples:
            raise SpecError(
                f"{self._loaded.where(['first_rung'])}: first_rung is {first:,}, but a trial has only {samples:,} samples; lower first_rung"
            )
        if not fresh:
            self._refuse_other_study()
        for trial in trials:
            try:
                loaded = self.job(trial)
            except SpecError as error:
                raise SpecError(f"{error} (in the trial {trial.name})") from None
            self._refuse_long_warmup(trial, loaded)
            record, now = {} if fresh else job_record(self.store / TRIALS / trial.name), loaded.tree()
            if record and not knows_defaults:
                now["config"] = _filled(now["config"], record["spec"]["config"])
            if record and (change := changed_key(record["spec"], now)):
                raise RunError(self._changed(f"has trained {trial.name} with", *change))

    def _refuse_other_study(self) -> None:
        """Refuse a change of a key on which the comparison of the trials depends."""
        if not self.store.exists(STUDY_FILE):
            return
        before, now = read_spec(self.store), self.spec
        pairs = {
            "samples": (before.samples, now.samples),
            "metric": (before.metric, now.metric),
            "measurements": (before.measurements, now.measurements),
            "batches": (before.batches[:1], now.batches[:1]),
            "rules": (before.rules[:1], now.rules[:1]),  # the first batch is only trained under the first rule
        }
        for key, (old, new) in pairs.items():
            if old != new:
                raise RunError(f"{self._loaded.where([key])}: {self._changed('was started with', key, old, new)}")

    def _refuse_long_warmup(self, trial: Trial, loaded: LoadedSpec) -> None:
        """Refuse a warmup that is longer than the trial."""
        plan = Plan(loaded.spec.plan, self.rows)
        warmup = loaded.spec.schedule.over(plan).warmup_samples
        if warmup > plan.total_samples:
            where = self._loaded.where
            origin, fix = where(["warmups"]), "set smaller warmups or more samples"
            if not self._loaded.spec.warmups:
                origin = f"{where(['job'])}: {self._loaded.file}"
                fix = "set warmups in the study, because the warmup of the job is too long here, or set more samples"
            raise SpecError(
                f"{origin}: {trial.name} has a warmup of {warmup:,.0f} samples but only {plan.total_samples:,} samples in all, so it "
                f"would never reach its learning rate; {fix}"
            )

    def _changed(self, verb: str, key: str, before: object, now: object) -> str:
        """Return the message for a key whose value has changed."""
        return (
            f"{self.url} {verb} {key} {json.dumps(before)}, but it is {json.dumps(now)} now; restore it, give the study another name, "
            "or start over with --fresh"
        )


def _filled(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with the missing keys of `given` from `defaults`."""
    filled = dict(defaults)
    for key, value in given.items():
        below = filled.get(key)
        filled[key] = _filled(value, below) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return filled
