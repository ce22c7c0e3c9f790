"""Submission of a job script through Ray's job API. The submitter follows the job to its end."""

import asyncio
import logging
import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from aiohttp import ClientError
from ray.exceptions import RayError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

import undula
from undula.errors import ClusterError

RECONNECT_S = 2.0
"""Seconds between two attempts to follow a job."""
RECONNECTS = 30
"""Maximum number of consecutive failed attempts."""
LASTING_S = 30.0
"""Duration in seconds after which a connection counts as a success: if it is lost later, failed attempts are counted from zero."""
LOST = (OSError, RuntimeError, ClientError)
"""Exceptions that Ray's client raises if the job API does not answer: those of requests, its own, and those of aiohttp."""
STOP_TIMEOUT_S = 5.0
"""Maximum time in seconds to wait until a job has stopped."""
_RAY_LOG_LINE = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\t[A-Z]+ \S+\.py:\d+ -- |Running entrypoint for job raysubmit_)"
)


def submit(dashboard: str, script: Path, arguments: Sequence[str], show: Callable[[str], None]) -> int:
    """Run `python script arguments...` on the cluster. The script's folder and this package are uploaded for it.

    Args:
        dashboard: URL of the job API.
        script: Path of the script; it can import files beside it.
        arguments: Arguments of the script.
        show: Callback for each line that the job prints.

    Returns:
        The exit status of the script.

    Raises:
        ClusterError: The cluster does not accept the job.
        KeyboardInterrupt: The user pressed Ctrl-C. The job has been stopped.
    """
    for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)  # hides messages about uploads and sockets
    # Hides the message that __pycache__ is not uploaded.
    logging.getLogger("ray._private.runtime_env.working_dir").setLevel(logging.ERROR)
    package = Path(undula.__file__).parent
    if not dashboard.startswith(("http://", "https://")):
        raise ClusterError(f"the address of the job API is {dashboard!r}, which is not a URL; use http://HOST:8265")
    try:
        client = JobSubmissionClient(dashboard)
        job_id = client.submit_job(
            entrypoint=shlex.join(["python", "-u", script.name, *arguments]),
            runtime_env={"working_dir": str(script.parent), "py_modules": [str(package)]},
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ClusterError(
            f"the cluster at {dashboard} does not accept the job: {' '.join(str(error).split())[:300]}"
        ) from error
    try:
        details = _follow_to_the_end(client, job_id, show)
    except Exception:
        raise  # the job continues without this process
    except BaseException:  # Ctrl-C, SIGTERM
        with suppress(*LOST):
            _stop(client, job_id)
        raise
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.driver_exit_code is None:
        show(details.message or f"the job ended as {details.status}")
    return details.driver_exit_code or 1


def _stop(client: JobSubmissionClient, job_id: str) -> None:
    client.stop_job(job_id)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while not client.get_job_status(job_id).is_terminal() and time.monotonic() < deadline:
        time.sleep(0.1)  # interval between two polls


def _follow_to_the_end(client: JobSubmissionClient, job_id: str, show: Callable[[str], None]) -> JobDetails:
    """Show the lines of a job until it has ended. If the connection is lost, the job continues, and this function reconnects.

    Raises:
        ClusterError: More than RECONNECTS attempts to reconnect have failed in a row.
    """
    show_new = _NewLines(show)
    failures = 0
    while True:
        began = time.monotonic()
        try:
            asyncio.run(_follow(client, job_id, show_new))
            details = client.get_job_info(job_id)
            if details.status.is_terminal():
                return details
        except LOST as error:
            failures = failures + 1 if time.monotonic() - began < LASTING_S else 1
            why = " ".join(str(error).split())
            if failures > RECONNECTS:
                raise ClusterError(
                    f"lost the connection to the job {job_id}, which may still be running: {why}; "
                    f"follow it with `ray job logs --follow {job_id}`"
                ) from error
            if failures == 1:
                show(f"lost the connection to the job, which continues; reconnecting: {why}")
        time.sleep(RECONNECT_S)
        show_new.start_over()


class _NewLines:
    """Callback that shows each line of a log once. Call `start_over` before the log is read from its beginning again."""

    def __init__(self, show: Callable[[str], None]):
        self._show = show
        self._shown = 0
        self._place = 0

    def __call__(self, line: str) -> None:
        self._place += 1
        if self._place > self._shown:
            self._shown = self._place
            self._show(line)

    def start_over(self) -> None:
        self._place = 0


async def _follow(client: JobSubmissionClient, job_id: str, show: Callable[[str], None]) -> None:
    rest = ""
    async for text in client.tail_job_logs(job_id):
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if not _RAY_LOG_LINE.match(line):
                show(line)
    if rest:
        show(rest)
