"""Loading of a study's YAML together with the YAML of its job, and the checks of both."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undula.config.job import JobSpec, LoadedSpec, as_overrides, load_spec
from undula.config.yaml_file import Where, flatten, load_file
from undula.errors import SpecError
from undula.study.spec import StudySpec
from undula.telemetry.registry import SETTINGS


@dataclass(frozen=True)
class LoadedStudy:
    """Study and its job, loaded from their YAML files."""

    spec: StudySpec
    job: LoadedSpec
    """Job with the study's overrides."""
    file: Path
    """YAML of the job."""
    where: Where
    """Function that returns the origin of a value of the study, for messages."""
    values: Mapping[str, Any]
    """Values of the job that the study overrides, by dotted key."""
    config_type: type | None = None
    """Dataclass of the script's own settings, if it has one."""

    def job_with(self, values: Mapping[str, Any]) -> LoadedSpec:
        """Return the job with the study's overrides and further values, by dotted key.

        Raises:
            SpecError: The job with these values is invalid.
        """
        sets = self.spec.sets

        def origin(key: str) -> str:
            return self.where([sets[key]]) if key in sets else self.where(["overrides", key])

        return load_spec(self.file, as_overrides({**self.values, **values}), self.config_type, origin)


def load_study(file: Path, overrides: Sequence[str] = (), config_type: type | None = None) -> LoadedStudy:
    """Load a study and its job from their YAML files, with overrides on top.

    Args:
        file: YAML of a StudySpec.
        overrides: Overrides of the study as `key.sub=value`; `overrides.plan.epochs=2` overrides a value of the job.
        config_type: Dataclass of the script's own settings. Without it, `config` of the job stays a mapping.

    Raises:
        SpecError: The study or its job is invalid.
    """
    spec, where = load_file(StudySpec, file, overrides, "a study's YAML", "name, job, batches", fix=_fix_of_unknown_key)
    job_file = file.parent / spec.job
    if not job_file.is_file():
        raise SpecError(
            f"{where(['job'])}: job is {json.dumps(spec.job)}, but {job_file} does not exist; set the path of a job's YAML, "
            "relative to that of the study"
        )
    # A packed trial is a single process, whatever the number of workers of the job.
    given = flatten(spec.overrides)
    values = {**({"workers.min": 1, "workers.max": 1} if spec.packed else {}), **dict(given)}
    for key in values:
        if [name for name, _ in given].count(key) > 1:
            raise SpecError(f"{where(['overrides'])}: overrides has {key} twice; remove one")
        if key in spec.sets:
            origin = where(["overrides", key])
            raise SpecError(f"{origin}: overrides has {key}, which the study sets from {spec.sets[key]}; remove it")
    job = load_spec(job_file, as_overrides(values), config_type, lambda key: where(["overrides", key]))
    _check_job(spec, job.spec, job_file, where)
    job = dataclasses.replace(job, variables={**where.variables, **job.variables})
    return LoadedStudy(spec, job, job_file, where, values, config_type)


def _fix_of_unknown_key(tree: Mapping[str, Any], key: str) -> str | None:
    """Return the fix for a file that is a job's YAML, or for a key of the job; None for any other key."""
    if "data" in tree and "batches" not in tree:
        return "this is a job's YAML; start it with `undula run`, or write a study that names it with the key job"
    if key in {field.name for field in dataclasses.fields(JobSpec)}:
        return f"it is a key of the job; write overrides.{key}, or put it below overrides"
    return None


def _check_job(spec: StudySpec, job: JobSpec, job_file: Path, where: Where) -> None:
    """Check that a study can train its job.

    Raises:
        SpecError: A value of the job does not fit the study.
    """
    virtual_workers = job.plan.virtual_workers
    for batch in spec.batches:
        if batch % virtual_workers:
            raise SpecError(
                f"{where(['batches'])}: batches has {batch}, which plan.virtual_workers ({virtual_workers}) of {job_file} "
                "does not divide; use multiples of it"
            )
    if spec.metric == "validation_loss" and job.data.validation is None:
        raise SpecError(
            f"{where(['metric'])}: metric is validation_loss, but {job_file} has no data.validation; add it, or set metric: training_loss"
        )
    if job.plan.batch == "elastic":
        raise SpecError(
            f"{where(['overrides'])}: plan.batch of {job_file} is elastic, but a study sets the batch of each trial; "
            "remove it, or set overrides: {plan.batch: fixed}"
        )
    if job.stop is not None:
        raise SpecError(
            f"{where(['overrides'])}: {job_file} has stop, but a study compares trials that have consumed the same number of samples; "
            "remove it, or set overrides: {stop: null}"
        )
    if job.trackers:
        raise SpecError(
            f"{where(['overrides'])}: {job_file} has trackers, but a study does not send its trials to trackers; remove them, or set "
            f"overrides: {{{', '.join(f'trackers.{key}: null' for key in SETTINGS)}}}"
        )
    if spec.packed and job.engine != "torch":
        raise SpecError(
            f"{where(['packed'])}: packed={spec.packed} trains in single processes and cannot be combined with engine={job.engine} of "
            f"{job_file}; remove one of them"
        )
    workers = job.workers
    if spec.packed and not (workers.cpus or workers.gpus not in ("auto", 0) or any(workers.resources.values())):
        raise SpecError(
            f"{where(['packed'])}: packed={spec.packed} shares the resources of a worker, but workers in {job_file} has no cpus, "
            "gpus or resources; set overrides: {workers.cpus: 1}"
        )
    share = workers.gpus / spec.packed if spec.packed and workers.gpus != "auto" else 0.0
    if share > 1 and share % 1:
        raise SpecError(
            f"{where(['packed'])}: packed={spec.packed} divides the {workers.gpus:g} GPUs of a worker in {job_file} into shares of "
            f"{share:.3g}, but Ray can only divide a single GPU; set overrides: {{workers.gpus: 1}}"
        )
