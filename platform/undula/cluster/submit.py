"""Submits a job script through Ray's job API and follows it to its end."""

import asyncio
import logging
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from ray.job_submission import JobStatus, JobSubmissionClient

import undula
from undula.errors import ClusterError

_RAY_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\t[A-Z]+ \S+\.py:\d+ -- ")


def submit(dashboard: str, script: Path, arguments: Sequence[str], show: Callable[[str], None]) -> int:
    """Run `python script arguments...` on the cluster; its folder and this package travel along.

    Args:
        dashboard: URL of the job API.
        script: the script; files beside it can be imported.
        arguments: of the script.
        show: called with each line that the job prints.

    Returns:
        The exit status of the script. A KeyboardInterrupt stops the job and passes.
    """
    for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)  # uploads and sockets are no news
    package = Path(undula.__file__).parent
    try:
        client = JobSubmissionClient(dashboard)
        job_id = client.submit_job(
            entrypoint=shlex.join(["python", "-u", script.name, *arguments]),
            runtime_env={"working_dir": str(script.parent), "py_modules": [str(package)]},
        )
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(
            f"the cluster at {dashboard} does not take jobs: {' '.join(str(error).split())[:300]}"
        ) from error
    try:
        asyncio.run(_follow(client, job_id, show))
    except BaseException:
        client.stop_job(job_id)
        raise
    details = client.get_job_info(job_id)
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.driver_exit_code is None:
        show(details.message or f"the job ended as {details.status}")
    return details.driver_exit_code or 1


async def _follow(client: JobSubmissionClient, job_id: str, show: Callable[[str], None]) -> None:
    rest = ""
    async for text in client.tail_job_logs(job_id):
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if not _RAY_LOG_LINE.match(line):
                show(line)
    if rest:
        show(rest)
