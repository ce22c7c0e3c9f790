"""The YAML of a study: it is loaded together with the YAML of its job, and both are checked before anything starts."""

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


@dataclass(frozen=True)
class LoadedStudy:
    """A study and its job, as their YAML files give them."""

    spec: StudySpec
    job: LoadedSpec
    """The job with the study's overrides."""
    file: Path
    """YAML of the job."""
    where: Where
    """Origins of the study's values."""
    values: Mapping[str, Any]
    """Values of the job that the study overrides, by dotted key."""
    config_type: type | None = None
    """Dataclass of the script's own settings, if it has one."""

    def job_with(self, values: Mapping[str, Any]) -> LoadedSpec:
        """The job with the study's overrides and with further values, by dotted key.

        Raises:
            SpecError: the values are not valid together.
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
        config_type: Dataclass of the script's settings. Without it the job's `config` stays a mapping.

    Raises:
        SpecError: the study or its job is not valid.
    """
    spec, where = load_file(StudySpec, file, overrides, "a study's YAML", "name, job, batches", fix=_fix_of_unknown_key)
    job_file = file.parent / spec.job
    if not job_file.is_file():
        raise SpecError(
            f"{where(['job'])}: job is {json.dumps(spec.job)}, and there is no file {job_file}; give a job's YAML, relative to the study's"
        )
    # A packed trial is one process, however many workers the job has.
    given = flatten(spec.overrides)
    values = {**({"workers.min": 1, "workers.max": 1} if spec.packed else {}), **dict(given)}
    for key in values:
        if [each for each, _ in given].count(key) > 1:
            raise SpecError(f"{where(['overrides'])}: overrides has {key} twice; keep one")
        if key in spec.sets:
            origin = where(["overrides", key])
            raise SpecError(f"{origin}: overrides has {key}, which the study sets from {spec.sets[key]}; remove it")
    job = load_spec(job_file, as_overrides(values), config_type, lambda key: where(["overrides", key]))
    _check_job(spec, job.spec, job_file, where)
    return LoadedStudy(spec, job, job_file, where, values, config_type)


def _fix_of_unknown_key(tree: Mapping[str, Any], key: str) -> str | None:
    """The fix for a file that is a job's YAML, or for a key of the job; None for any other key."""
    if "data" in tree and "batches" not in tree:
        return "this is a job's YAML; start it with `undula run`, or write a study that names it with the key job"
    if key in {each.name for each in dataclasses.fields(JobSpec)}:
        return f"it is a key of the job; write overrides.{key}, or put it below overrides"
    return None


def _check_job(spec: StudySpec, job: JobSpec, job_file: Path, where: Where) -> None:
    """Check that a study can train its job.

    Raises:
        SpecError: it cannot.
    """
    virtual_workers = job.plan.virtual_workers
    for batch in spec.batches:
        if batch % virtual_workers:
            raise SpecError(
                f"{where(['batches'])}: batches has {batch}, which plan.virtual_workers ({virtual_workers}) of {job_file} "
                "does not divide; give multiples of it"
            )
    if spec.metric == "validation_loss" and job.data.validation is None:
        raise SpecError(
            f"{where(['metric'])}: metric is validation_loss, and {job_file} has no data.validation; add it, or give metric: training_loss"
        )
    if job.plan.batch == "elastic":
        raise SpecError(
            f"{where(['overrides'])}: plan.batch of {job_file} is elastic, and a study sets the batch of each training; "
            "remove it, or give overrides: {plan.batch: fixed}"
        )
    if spec.packed and job.engine == "horovod":
        raise SpecError(
            f"{where(['packed'])}: packed={spec.packed} trains in single processes and cannot be combined with engine=horovod of "
            f"{job_file}; remove one of them"
        )
    if spec.packed and not (job.workers.cpus or job.workers.gpus or any(job.workers.resources.values())):
        raise SpecError(
            f"{where(['packed'])}: packed={spec.packed} shares the resources of a worker, and workers of {job_file} has neither cpus "
            "nor gpus nor resources; give overrides: {workers.cpus: 1}"
        )
