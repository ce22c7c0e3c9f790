"""Following of a submitted job to its end, through interruptions of the connection."""

import asyncio
import re
import time
from collections.abc import Callable

from aiohttp import ClientError
from ray.job_submission import JobDetails, JobSubmissionClient

from undula.errors import FAILED, ConnectionLostError

RECONNECT_S = 2.0
"""Seconds between two attempts to follow a job."""
RECONNECTS = 30
"""Maximum number of consecutive failed attempts."""
LASTING_S = 30.0
"""Duration in seconds after which a connection counts as a success: if it is lost later, failed attempts are counted from zero."""
LOST = (OSError, RuntimeError, ClientError)
"""Exceptions that Ray's client raises if the job API does not answer: those of requests, its own, and those of aiohttp."""
HEAD_LOST = "JOB_SUPERVISOR_ACTOR_DIED"
"""Ray's type of the error of a job whose process on the head is lost."""
_RAY_LOG_LINE = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\t[A-Z]+ \S+\.py:\d+ -- |Running entrypoint for job raysubmit_)"
)


def follow_to_the_end(
    api: JobSubmissionClient, job: str, show: Callable[[str], None], forever: bool = False
) -> JobDetails | None:
    """Show the lines of a job until it has ended. If the connection is lost, the job continues, and this function reconnects.

    Args:
        api: Client of the job API.
        job: Id of the job.
        show: Callback for each line that the job prints.
        forever: Whether to reconnect without end, instead of RECONNECTS times in a row.

    Returns:
        The job; None if the cluster has lost it, because its head was replaced.

    Raises:
        ConnectionLostError: More than RECONNECTS attempts to reconnect have failed in a row.
    """
    show_new = _NewLines(show)
    failures = 0
    while True:
        began = time.monotonic()
        try:
            asyncio.run(_follow(api, job, show_new))
            details = api.get_job_info(job)
            if details.status.is_terminal():
                return None if details.error_type == HEAD_LOST else details
        except LOST as error:
            failures = failures + 1 if time.monotonic() - began < LASTING_S else 1
            why = " ".join(str(error).split())
            if "404" in why and _is_unknown(api, job):
                return None
            if failures > RECONNECTS and not forever:
                raise ConnectionLostError(
                    f"lost the connection to the job {job}, which may still be running: {why}; "
                    "follow it with `undula logs RUN --follow`"
                ) from error
            if failures == 1:
                show(f"lost the connection to the job, which continues; reconnecting: {why}")
        time.sleep(RECONNECT_S)
        show_new.start_over()


def exit_status(details: JobDetails, show: Callable[[str], None]) -> int:
    """Return the exit status of an ended job's driver, as a shell reports it. Without a driver, show why the job ended."""
    if details.status == "SUCCEEDED":
        return 0
    if details.driver_exit_code is None:
        show(details.message or f"the job ended as {details.status}")
    code = details.driver_exit_code or FAILED
    return code if code > 0 else 128 - code


def lines_of(log: str) -> list[str]:
    """Return the lines of a job's log, without Ray's own."""
    return [line for line in log.rstrip("\n").split("\n") if not _RAY_LOG_LINE.match(line)]


def _is_unknown(api: JobSubmissionClient, job: str) -> bool:
    try:
        api.get_job_info(job)
    except LOST as error:
        return "status code 404" in str(error)
    return False


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


async def _follow(api: JobSubmissionClient, job: str, show: Callable[[str], None]) -> None:
    rest = ""
    async for text in api.tail_job_logs(job):
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if not _RAY_LOG_LINE.match(line):
                show(line)
    if rest:
        show(rest)
