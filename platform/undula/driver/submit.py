"""Jobs of runs and studies on a cluster, through Ray's job API: they are submitted, listed and stopped here."""

import logging
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any
from zipfile import ZipFile

from ray.exceptions import RayError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient
from requests import Response

import undula
from undula.driver.connection import SET_TOKEN
from undula.driver.follow import LOST, is_unknown
from undula.driver.script import FOLDER
from undula.elastic.ray import private_environment
from undula.errors import ClusterError, ConnectionLostError, RunError, SpecError, one_line
from undula.state.defaults import default_runs

RUN = "undula_run"
"""Key of a job's metadata with the directory of its run or study."""
POLL_S = 0.1
"""Seconds between two looks at a job that is being stopped, and between two submissions to a head that is not ready."""
CONNECT_TIMEOUT_S = 5.0
"""Maximum time in seconds to reach a job API."""
ANSWER_TIMEOUT_S = 60.0
"""Maximum time in seconds to wait for an answer of a job API."""
UPLOAD_TIMEOUT_S = 600.0
"""Maximum time in seconds to upload a package."""
AGENT_TIMEOUT_S = 120.0
"""Maximum time in seconds to wait until the head of a cluster that has just started accepts jobs."""
MOST_PACKAGE_BYTES = 100 * 2**20
"""Maximum size of a package that a head accepts, in bytes (DASHBOARD_CLIENT_MAX_SIZE in ray/_private/ray_constants.py)."""
NO_AGENT = "No available agent to submit job"
"""Answer of Ray's job API on a head whose agent, which starts the jobs, is not ready (dashboard/modules/job/job_head.py)."""


class JobApi(JobSubmissionClient):
    """Client of a cluster's job API that waits for no answer forever and can store the environment variables of a job."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Response:
        """Send a request with time limits. Ray's own requests would wait forever for a head that has vanished without a word.

        Raises:
            SpecError: A package is larger than the head accepts.
        """
        if len(options.get("data") or b"") > MOST_PACKAGE_BYTES:
            raise SpecError(_too_large(options["data"]))
        # While a request is sent, the limit for connecting applies to all of its content.
        connect_s = UPLOAD_TIMEOUT_S if method == "PUT" else CONNECT_TIMEOUT_S
        return super()._do_request(method, endpoint, timeout=(connect_s, ANSWER_TIMEOUT_S), **options)

    def _upload_py_modules_if_needed(self, runtime_env: dict[str, Any]) -> None:
        """Upload packages as a whole, and modules that are files.

        Ray alone would leave out folders of packages that `excludes` names, such as `data`, and does not upload single files.
        """
        runtime_env.pop("excludes", None)  # the working directory has been uploaded before
        modules = runtime_env["py_modules"]
        if files := [module for module in modules if module.endswith(".py") and "://" not in module]:
            with TemporaryDirectory() as folder:
                for file in files:
                    shutil.copy(file, folder)
                package = self._upload_package_if_needed(folder, include_gitignore=False)
            runtime_env["py_modules"] = [*(module for module in modules if module not in files), package]
        super()._upload_py_modules_if_needed(runtime_env)

    def store(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Store variables on the cluster, and return the environment variables with which the job's processes take them."""
        package = private_environment.new_package()
        response = self._do_request("PUT", f"/api/packages/gcs/{package}", data=private_environment.packed(variables))
        if response.status_code != HTTPStatus.OK:
            self._raise_error(response)
        return private_environment.variables_for(package)


def _too_large(package: bytes) -> str:
    """Return why the package of a folder cannot be uploaded, with the largest parts of the folder."""
    sizes: Counter[str] = Counter()
    with ZipFile(BytesIO(package)) as archive:
        for entry in archive.infolist():
            sizes[entry.filename.partition("/")[0]] += entry.compress_size
    parts = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for name, size in sizes.most_common(3))
    return (
        f"a folder that the job needs has {len(package) / 2**20:.0f} MiB when it is packed, and a cluster accepts "
        f"{MOST_PACKAGE_BYTES >> 20} MiB; move the largest parts, {parts}, to s3:// or a shared file system, or name them in a file "
        ".rayignore in that folder"
    )


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
        if "Authentication" in str(error):
            raise ClusterError(f"the cluster at {dashboard} rejects this command; {SET_TOKEN}") from error
        raise ClusterError(f"the cluster at {dashboard} cannot be reached: {_in_short(error)}") from error


def new_job() -> str:
    """Return the id of a job that is to be started."""
    return f"raysubmit_{token_hex(8)}"


def start(
    api: JobApi,
    job: str,
    run: str,
    script: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    runtime_env: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Run a script on the cluster as the driver of a job. The script's folder and this package are uploaded for it.

    A job is started once, also if this function is called again because the cluster's answer was lost.

    Args:
        api: Client of the job API.
        job: Id of the job.
        run: Directory of the run or study.
        script: Path of the script; it can import files beside it.
        arguments: Arguments of the script.
        environment: Environment variables of the job's processes, which only they can read.
        runtime_env: Ray's runtime environment for the job, to which this function adds.

    Raises:
        SpecError: The script's folder is too large to be uploaded.
        ClusterError: The cluster does not accept the job.
        ConnectionLostError: The cluster has not answered. It may have started the job.
    """
    script = script.absolute()
    try:
        if not is_unknown(api, job):
            return
        _submit(
            api,
            submission_id=job,
            entrypoint=shlex.join(["python", "-u", "-m", "undula.driver", script.name, *arguments]),
            metadata={RUN: directory(run)},
            runtime_env={
                **runtime_env,
                "working_dir": str(script.parent),
                "py_modules": [str(Path(undula.__file__).parent), *runtime_env.get("py_modules", ())],
                "env_vars": {
                    **runtime_env.get("env_vars", {}),
                    "PYTHONHASHSEED": "0",
                    FOLDER: str(script.parent),
                    **(api.store(environment) if environment else {}),
                },
            },
        )
    except (*LOST, ValueError, RayError) as error:
        _raise_unless_accepted(api, job, error)


def _submit(api: JobApi, **job: Any) -> None:
    """Submit a job, and try again while the head's agent is not ready."""
    deadline = time.monotonic() + AGENT_TIMEOUT_S
    while True:
        try:
            api.submit_job(**job)
        except RuntimeError as error:
            if NO_AGENT not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
        else:
            return


def _raise_unless_accepted(api: JobApi, job: str, error: Exception) -> None:
    """Raise an error of a submission, unless the cluster has the job: then only its answer was lost."""
    try:
        if not is_unknown(api, job):
            return
    except (*LOST, RayError):
        raise ConnectionLostError(
            f"the cluster at {api.get_address()} has not answered the submission of the job {job}, which may train: {_in_short(error)}; "
            "see `undula ls` once the cluster answers"
        ) from error
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
    by_run: dict[str, list[JobDetails]] = {}
    for job in sorted(jobs, key=lambda job: -(job.start_time or 0)):
        if run := (job.metadata or {}).get(RUN):
            by_run.setdefault(run, []).append(job)
    return by_run


def jobs_of(api: JobApi, run: str, runs: str | None = None) -> list[JobDetails]:
    """Return the jobs of a run or study, newest first.

    Args:
        api: Client of the job API.
        run: Directory of the run or study, or its name. Runs of other folders that have the same name may be other people's.
        runs: Folder in which the name is looked up; by default the working directory and `default_runs`.

    Raises:
        RunError: The cluster has no such job, or jobs of several runs fit.
    """
    is_name = "://" not in run and not run.startswith(("/", "~"))
    below = f"{(runs or default_runs()).rstrip('/')}/{run}"
    urls = {directory(place) for place in ([run] if not is_name else [below] if runs else [below, run])}
    jobs = jobs_by_run(api)
    matching = sorted(urls & jobs.keys())
    if len(matching) == 1:
        return jobs[matching[0]]
    where = f"the cluster at {api.get_address()} has"
    if matching:
        raise RunError(f"{where} jobs of {' and '.join(matching)}; give one of these directories")
    if others := sorted(url for url in jobs if url.rpartition("/")[2] == run):
        raise RunError(
            f"{where} no job of {run} in {runs or default_runs()}, but of {' and '.join(others)}; give the directory of the run"
        )
    raise RunError(f"{where} no job of {run}; give the name of a run or study that was submitted to it")


def current(jobs: Sequence[JobDetails]) -> JobDetails:
    """Return the newest job that has not ended, or else the newest one. A second submission of a run ends at once and is newer."""
    return next((job for job in jobs if not job.status.is_terminal()), jobs[0])


def log_of(api: JobApi, job: str) -> str:
    """Return what a job has printed.

    Raises:
        ClusterError: The job API does not answer.
    """
    try:
        return api.get_job_logs(job)
    except LOST as error:
        raise ClusterError(
            f"the cluster at {api.get_address()} does not show the log of the job {job}: {_in_short(error)}"
        ) from error


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
    return one_line(error)[:300]
