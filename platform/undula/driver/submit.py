"""Jobs of runs and studies on a cluster, through Ray's job API: they are submitted, listed and stopped here."""

import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

import undula
from undula.driver.follow import LOST
from undula.elastic.ray import private_environment
from undula.errors import ClusterError, RunError, SpecError

RUN = "undula_run"
"""Key of a job's metadata with the directory of its run or study."""
POLL_S = 0.1
"""Seconds between two looks at a job that is being stopped."""


class JobApi(JobSubmissionClient):
    """Client of a cluster's job API that can also store the environment variables of a job."""

    def store(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Store variables on the cluster, and return the part of the runtime environment with which the job's processes take them."""
        package = private_environment.new_package()
        response = self._do_request("PUT", f"/api/packages/gcs/{package}", data=private_environment.packed(variables))
        if response.status_code != HTTPStatus.OK:
            self._raise_error(response)
        return private_environment.runtime_env(package)


def connect(dashboard: str) -> JobApi:
    """Return a client of the job API at a URL.

    Raises:
        SpecError: The address is not a URL.
        ClusterError: The job API does not answer, or rejects the token.
    """
    for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)  # hides messages about uploads and sockets
    # Hides the message that __pycache__ is not uploaded.
    logging.getLogger("ray._private.runtime_env.working_dir").setLevel(logging.ERROR)
    if not dashboard.startswith(("http://", "https://")):
        raise SpecError(f"the address of the job API is {dashboard!r}, which is not a URL; use http://HOST:8265")
    try:
        return JobApi(dashboard)
    except (*LOST, ValueError, RayError) as error:
        raise ClusterError(f"the cluster at {dashboard} cannot be reached: {_in_short(error)}") from error


def start(api: JobApi, run: str, script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run `python script arguments...` on the cluster. The script's folder and this package are uploaded for it.

    Args:
        api: Client of the job API.
        run: Directory of the run or study.
        script: Path of the script; it can import files beside it.
        arguments: Arguments of the script.
        environment: Environment variables of the job's processes.

    Returns:
        The id of the job.

    Raises:
        ClusterError: The cluster does not accept the job.
    """
    package = Path(undula.__file__).parent
    try:
        return api.submit_job(
            entrypoint=shlex.join(["python", "-u", script.name, *arguments]),
            metadata={RUN: directory(run)},
            runtime_env={
                "working_dir": str(script.parent),
                "py_modules": [str(package)],
                **(api.store(environment) if environment else {}),
            },
        )
    except (*LOST, ValueError, RayError) as error:
        raise ClusterError(f"the cluster at {api.get_address()} does not accept the job: {_in_short(error)}") from error


def directory(run: str) -> str:
    """Return the URL or the absolute path of the directory of a run or study."""
    return run.rstrip("/") if "://" in run else str(Path(run).expanduser().absolute())


def jobs_by_run(api: JobApi) -> dict[str, list[JobDetails]]:
    """Return the jobs of each run and study of a cluster, newest first, by its directory.

    Raises:
        ClusterError: The job API does not answer.
    """
    try:
        jobs = api.list_jobs()
    except LOST as error:
        raise ClusterError(f"the cluster at {api.get_address()} cannot list its jobs: {_in_short(error)}") from error
    found: dict[str, list[JobDetails]] = {}
    for job in sorted(jobs, key=lambda job: -(job.start_time or 0)):
        if run := (job.metadata or {}).get(RUN):
            found.setdefault(run, []).append(job)
    return found


def jobs_of(api: JobApi, run: str) -> list[JobDetails]:
    """Return the jobs of a run or study, newest first, by its name or directory.

    Raises:
        RunError: The cluster has no such job.
    """
    url = directory(run)
    found = [
        job for each, jobs in jobs_by_run(api).items() if each == url or each.rpartition("/")[2] == run for job in jobs
    ]
    if not found:
        raise RunError(
            f"the cluster at {api.get_address()} has no job of {run}; give the name of a run or study that was submitted to it"
        )
    return sorted(found, key=lambda job: -(job.start_time or 0))


def stop(api: JobApi, job: str, limit_s: float) -> bool:
    """Stop a job, and return whether it has ended within a time limit.

    Raises:
        ClusterError: The job API does not answer.
    """
    deadline = time.monotonic() + limit_s
    try:
        api.stop_job(job)
        while not JobStatus(api.get_job_status(job)).is_terminal():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
    except LOST as error:
        raise ClusterError(
            f"the cluster at {api.get_address()} does not stop the job {job}: {_in_short(error)}"
        ) from error
    return True


def _in_short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
