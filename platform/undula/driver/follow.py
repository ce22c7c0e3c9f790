"""Following of a submitted job to its end, through interruptions of the connection."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

from aiohttp import ClientError
from ray.job_submission import JobDetails, JobSubmissionClient

from undula.errors import FAILED, INTERRUPTED, ConnectionLostError, one_line

RECONNECT_S = 2.0
"""Seconds between two attempts to follow a job."""
RECONNECTS = 30
"""Maximum number of consecutive failed attempts."""
PROBE_S = 10.0
"""Seconds between two questions whether the job has ended. A head that does not answer has vanished, without closing the connection."""
SILENCE_S = 300.0
"""Seconds without a line after which the log of a job is requested again, because its connection may be dead although the head lives."""
LAST_LINES_S = 5.0
"""Seconds without a line after which the log of an ended job is requested again, once."""
LASTING_S = 30.0
"""Duration in seconds after which a connection counts as a success: if it was alive for longer, failed attempts are counted from zero."""
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
    log = _Log(show)
    failures, was_over = 0, False
    while True:
        began = log.seen_at = time.monotonic()
        try:
            is_whole = _follow(api, job, log)
            details = api.get_job_info(job)
            if details.status.is_terminal() and (is_whole or was_over):
                return None if details.error_type == HEAD_LOST else details
            was_over = details.status.is_terminal()
        except LOST as error:
            failures = failures + 1 if log.seen_at - began < LASTING_S else 1
            why = one_line(error)
            if "404" in why and _is_lost(api, job):
                return None
            if failures > RECONNECTS and not forever:
                raise ConnectionLostError(
                    f"lost the connection to the job {job}, which may still be running: {why}; "
                    "follow it with `undula logs RUN --follow`"
                ) from error
            if failures == 1:
                show(f"lost the connection to the job, which continues; reconnecting: {why}")
        time.sleep(RECONNECT_S)
        log.start_over()


def exit_status(details: JobDetails, show: Callable[[str], None]) -> int:
    """Return the exit status of an ended job's driver, as a shell reports it. Without a driver, show why the job ended."""
    if details.status == "SUCCEEDED":
        return 0
    if details.driver_exit_code is None:
        show(details.message or f"the job ended as {details.status}")
    # Ray records no status of the driver of a job that was stopped.
    code = details.driver_exit_code or (INTERRUPTED if details.status == "STOPPED" else FAILED)
    return code if code > 0 else 128 - code


def lines_of(log: str) -> list[str]:
    """Return the lines of a job's log, without Ray's own."""
    return [line for line in log.rstrip("\n").split("\n") if not _RAY_LOG_LINE.match(line)]


def is_unknown(api: JobSubmissionClient, job: str) -> bool:
    """Return whether a cluster has no job of this id.

    Raises:
        OSError, RuntimeError: The job API does not answer.
    """
    try:
        api.get_job_info(job)
    except LOST as error:
        if "status code 404" in str(error):
            return True
        raise
    return False


def _is_lost(api: JobSubmissionClient, job: str) -> bool:
    try:
        return is_unknown(api, job)
    except LOST:
        return False


class _Log:
    """Log of a job, each line of which is shown once. Call `start_over` before it is read from its beginning again."""

    def __init__(self, show: Callable[[str], None]):
        self._show = show
        self._shown = 0
        self._place = 0
        self._rest = ""
        self.seen_at = 0.0
        """Time of the last sign of life of the connection, on the monotonic clock."""
        self.printed_at = 0.0
        """Time at which the log was requested or has grown, on the monotonic clock."""

    async def read(self, texts: AsyncIterator[str]) -> None:
        """Read the log from its beginning to its end."""
        async for text in texts:
            self.seen_at = self.printed_at = time.monotonic()
            *lines, self._rest = (self._rest + text).split("\n")
            self._add(lines)
        if self._rest:
            self._add([self._rest])

    def start_over(self) -> None:
        self._place = 0
        self._rest = ""

    def _add(self, lines: Sequence[str]) -> None:
        for line in lines:
            if _RAY_LOG_LINE.match(line):
                continue
            self._place += 1
            if self._place > self._shown:
                self._shown = self._place
                self._show(line)


def _follow(api: JobSubmissionClient, job: str, log: _Log) -> bool:
    """Show the lines of a job until they end. Return whether they were all; if not, their connection may be dead.

    The requests are sent outside of the event loop, where Ctrl-C ends them at once.
    """
    log.printed_at = time.monotonic()
    with asyncio.Runner() as runner:
        tail = runner.run(_begin(log.read(api.tail_job_logs(job))))
        while not runner.run(_has_ended(tail, PROBE_S)):
            limit_s = LAST_LINES_S if api.get_job_info(job).status.is_terminal() else SILENCE_S
            log.seen_at = time.monotonic()
            if log.seen_at - log.printed_at > limit_s:
                return False
    return True


async def _begin(work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
    return asyncio.create_task(work)


async def _has_ended(task: "asyncio.Task[None]", limit_s: float) -> bool:
    """Wait for a task, and return whether it has ended within a time limit. Raise the exception with which it has ended."""
    done, _ = await asyncio.wait({task}, timeout=limit_s)
    if done:
        task.result()
    return bool(done)
