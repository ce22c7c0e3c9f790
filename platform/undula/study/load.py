"""The YAML of a study, with its job: both are checked whole before anything starts."""

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
    """A study, and the job that it trains."""

    spec: StudySpec
    job: LoadedSpec
    """With the study's overrides."""
    file: Path
    """Of the job."""
    where: Where
    """The study's values were given: the place of each key."""
    values: Mapping[str, Any]
    """Of the job, by dotted key, that are the study's."""
    config_type: type | None = None

    def job_with(self, values: Mapping[str, Any]) -> LoadedSpec:
        """The job with the study's overrides and further values, by dotted key.

        Raises:
            SpecError: they do not go together.
        """
        sets = self.spec.sets

        def origin(key: str) -> str:
            return self.where([sets[key]]) if key in sets else self.where(["overrides", key])

        return load_spec(self.file, as_overrides({**self.values, **values}), self.config_type, origin)


def load_study(file: Path, overrides: Sequence[str] = (), config_type: type | None = None) -> LoadedStudy:
    """The study in a YAML file, with `key.sub=value` overrides on top, and its job.

    Args:
        file: YAML of a StudySpec.
        overrides: of the study; `overrides.plan.epochs=2` is one of its job.
        config_type: as of `load_spec`, for the job.

    Raises:
        SpecError: one sentence, as of `load_spec`, about the study or about its job.
    """
    spec, where = load_file(StudySpec, file, overrides, "a study's YAML", "name, job, batches", fix=_fix_of_unknown_key)
    job_file = file.parent / spec.job
    if not job_file.is_file():
        raise SpecError(
            f"{where(['job'])}: job is {json.dumps(spec.job)}, and there is no file {job_file}: give a job's YAML"
        )
    # A packed training is one process, whatever the job's workers are.
    given = flatten(spec.overrides)
    values = {**({"workers.min": 1, "workers.max": 1} if spec.packed else {}), **dict(given)}
    for key in values:
        if [each for each, _ in given].count(key) > 1:
            raise SpecError(f"{where(['overrides'])}: overrides has {key} twice: keep one")
        if key in spec.sets:
            origin = where(["overrides", key])
            raise SpecError(f"{origin}: overrides has {key}, which a study sets, by {spec.sets[key]}: leave it out")
    job = load_spec(job_file, as_overrides(values), config_type, lambda key: where(["overrides", key]))
    _check_job(spec, job.spec, job_file, where)
    return LoadedStudy(spec, job, job_file, where, values, config_type)


def _fix_of_unknown_key(tree: Mapping[str, Any], key: str) -> str | None:
    if "data" in tree and "batches" not in tree:
        return "this is a job's YAML, which `undula run` trains; a study's names it with the key job"
    if key in {each.name for each in dataclasses.fields(JobSpec)}:
        return f"it is the job's: write overrides.{key}, or below overrides"
    return None


def _check_job(spec: StudySpec, job: JobSpec, job_file: Path, where: Where) -> None:
    """What a study needs of its job.

    Raises:
        SpecError: it does not have it.
    """
    virtual_workers = job.plan.virtual_workers
    for batch in spec.batches:
        if batch % virtual_workers:
            raise SpecError(
                f"{where(['batches'])}: batches has {batch}, which plan.virtual_workers ({virtual_workers}) of {job_file} "
                "does not divide: give multiples of it"
            )
    if spec.metric == "validation_loss" and job.data.validation is None:
        raise SpecError(
            f"{where(['metric'])}: metric is validation_loss, and {job_file} has no data.validation: give it, or metric: training_loss"
        )
    if job.plan.batch == "elastic":
        raise SpecError(
            f"{where(['overrides'])}: plan.batch of {job_file} is elastic, and a study gives each training a batch: "
            "leave it out, or give overrides: {plan.batch: fixed}"
        )
    if spec.packed and job.engine == "horovod":
        raise SpecError(
            f"{where(['packed'])}: packed is {spec.packed}, which makes each training one process, and {job_file} has engine: horovod, "
            "which is about several: leave out one of them"
        )
    if spec.packed and not (job.workers.cpus or job.workers.gpus or any(job.workers.resources.values())):
        raise SpecError(
            f"{where(['packed'])}: packed is {spec.packed}, which shares what a worker has, and workers of {job_file} has neither cpus "
            "nor gpus nor resources: give overrides: {workers.cpus: 1}"
        )
