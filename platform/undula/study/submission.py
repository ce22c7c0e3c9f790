"""Submission of a study to a cluster: the script of its job, with the study's YAML as an argument."""

from collections.abc import Sequence
from pathlib import Path

from undula.config.environment import without_secrets
from undula.config.job import absolute_paths, script_of
from undula.config.yaml_file import files_for_job
from undula.driver.project import project_modules
from undula.driver.submission import FRESH, Submission, name_in_submission
from undula.study.load import LoadedStudy


def submission_of_study(
    file: Path,
    loaded: LoadedStudy,
    overrides: Sequence[str],
    script: Path | None,
    fresh: bool,
    project: Path | None = None,
) -> Submission:
    """Return the submission of a study. The arguments are those of `undula.driver.submission.submission_of_job`.

    Raises:
        SpecError: The job has no script.
    """
    script, job = script_of(loaded.file, script), loaded.job.spec
    study_name, job_name = names_in_submission(script, file, loaded.file)
    options = ["--study", study_name, *([FRESH] if fresh else []), f"job={job_name}"]
    shown, private = without_secrets(overrides)
    paths = (f"overrides.{path}" for path in absolute_paths(job))
    return Submission(
        script=script,
        arguments=(*options, *shown, *paths),
        environment={**private, **files_for_job(script, [file, loaded.file])},
        modules=tuple(project_modules(script, project)),
        workers=job.workers,
        origins=loaded.job.origins,
        kind="study",
        url=f"{job.runs.rstrip('/')}/{loaded.spec.name}",
        packed=loaded.spec.packed or 1,
    )


def names_in_submission(script: Path, study: Path, job: Path) -> tuple[str, str]:
    """Return the paths of the YAML of a study and of its job for a submitted script. The path of the job must fit that of the study."""
    name = name_in_submission(script, study)
    return name, str(job.absolute()) if Path(name).is_absolute() else name_in_submission(script, job)
