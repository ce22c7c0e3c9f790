"""Repetition of requests while a store is busy or cannot be reached.

Also here: what a process reports about its stores: outages for which requests wait, and caches that take no more data.

Also here: errors of the operating system and of S3 as StorageErrors, which name the file.
"""

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from undula.errors import StorageError, UnavailableError, one_line
from undula.storage.s3 import forget_clients

_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
"""Errors of a file system that is full, or whose disk or server has failed."""


class MissingError(Exception):
    """An object does not exist."""


class ChangedError(Exception):
    """An object does not have the expected ETag."""


@contextmanager
def named_errors(verb: str, where: str) -> Iterator[None]:
    """Raise errors of this block as StorageErrors.

    Args:
        verb: Operation that fails, such as "read".
        where: URL of the file.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageError) or not _is_of_storage(error):
            raise
        detail = " ".join((getattr(error, "strerror", None) or str(error)).split())
        detail = detail.replace(" (reached max retries: 0)", "")  # retries.py repeats requests, and not botocore
        kind = UnavailableError if _may_pass(error, where.startswith("s3://")) else StorageError
        raise kind(f"cannot {verb} {where}: {detail}") from error


def _may_pass(error: Exception, is_s3: bool) -> bool:
    """Return whether the same request may succeed later without a change of the job."""
    if not is_s3:
        return isinstance(error, OSError) and error.errno in _PASSING
    from undula.storage.retries import temporary_problem  # imported when S3 is in use, because botocore takes time

    return not isinstance(error, (MissingError, ChangedError)) and temporary_problem(error) is not None


def _is_of_storage(error: Exception) -> bool:
    if isinstance(error, (OSError, MissingError, ChangedError)):
        return True
    from botocore.exceptions import BotoCoreError, ClientError  # imported when S3 may be in use, because it takes time
    from urllib3.exceptions import HTTPError

    return isinstance(error, (BotoCoreError, ClientError, HTTPError))


QUIET_S = 60.0
"""Time in seconds without a failure after which the next one belongs to another outage."""


@dataclass(frozen=True)
class Wait:
    """Outage of a store for which requests wait."""

    place: str
    """URL of the bucket."""
    problem: str
    """Failure of the last request, in one line."""
    limit_s: float
    """Time in seconds after which a request that fails is given up."""


@dataclass(frozen=True)
class LostCache:
    """Cache of a store's data on a disk that takes no more data."""

    folder: str
    host: str
    problem: str
    """Failure of the last write, in one line."""


Reporter: TypeAlias = Callable[[Wait | LostCache], None]


@dataclass
class Outages:
    """Knows which failures belong to the same outage: those of one place, with less than QUIET_S between one and the next."""

    _last: dict[str, float] = field(default_factory=dict)

    def begins(self, place: str, now: float) -> bool:
        """Record a failure, and return whether an outage begins with it."""
        last = self._last.get(place)
        self._last[place] = now
        return last is None or now - last > QUIET_S


_lock = threading.Lock()
_reporter: Reporter | None = None
_outages = Outages()


def report_failure(wait: Wait) -> None:
    """Report a request that has failed for a while, unless its outage has been reported."""
    if reporter := _reporter:
        with _lock:
            is_new = _outages.begins(wait.place, time.monotonic())
        if is_new:
            reporter(wait)


def report_lost_cache(lost: LostCache) -> None:
    """Report that a cache takes no more data from this process."""
    if reporter := _reporter:
        reporter(lost)


def waits_reporter() -> Reporter | None:
    """Return the callback for reports of this process. It can be sent to other processes that read for this one."""
    return _reporter


@contextmanager
def waits_reported_to(reporter: Reporter | None) -> Iterator[None]:
    """Report the outages for which requests of any thread wait during this block, and the caches that are lost, each once.

    Args:
        reporter: Callback, which must neither wait nor fail; None for no reports.
    """
    global _reporter, _outages
    former, _reporter, _outages = _reporter, reporter, Outages()
    try:
        yield
    finally:
        _reporter = former


RETRY_FOR_S = 20.0
"""Time in seconds after which a failing request is not repeated again. Requests for training data wait longer."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0
"""Time in seconds to wait before the first retry, and the longest wait. The wait doubles after each retry."""
REPORT_AFTER_S = 1.0
"""Time in seconds for which a request has to fail before this is reported. A busy store refuses single requests all the time."""

_BUSY_CODES = frozenset(
    {
        *("InternalError", "RequestLimitExceeded", "RequestThrottled", "RequestTimeout", "ServiceUnavailable"),
        *("SlowDown", "Throttling", "ThrottlingException", "TooManyRequestsException", "IDPCommunicationError"),
    }
)
_NOT_IMPLEMENTED = frozenset({501, 505})
T = TypeVar("T")


def retried(request: Callable[[], T], place: str, limit_s: float | None = None) -> T:
    """Send a request, and repeat it while its failure may be temporary.

    Args:
        request: Function that sends the request once.
        place: URL of the bucket, for reports.
        limit_s: Time in seconds after which the last error is raised; RETRY_FOR_S by default.
    """
    limit_s = RETRY_FOR_S if limit_s is None else limit_s
    failing_since, wait_s = None, FIRST_WAIT_S
    while True:
        try:
            return request()
        except Exception as error:
            now = time.monotonic()
            failing_since = now if failing_since is None else failing_since
            problem = temporary_problem(error)
            if problem is None or now - failing_since + wait_s > limit_s:
                raise
            if _lacks_credentials(error):
                forget_clients()  # a client that has found none never looks for them again
        if now - failing_since >= REPORT_AFTER_S:
            report_failure(Wait(place, problem, limit_s))
        time.sleep(random.uniform(0, wait_s))  # full jitter, so that the ranks of a run do not retry at the same time
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def temporary_problem(error: Exception) -> str | None:
    """Return the problem in one line if the same request may succeed later, otherwise None."""
    from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError
    from botocore.exceptions import ConnectionError as NoConnectionError
    from urllib3.exceptions import HTTPError

    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code"))
        status = status_of(error)
        is_busy = code in _BUSY_CODES or status == 429 or (status >= 500 and status not in _NOT_IMPLEMENTED)
        return f"{status} {code} ({error.operation_name})" if is_busy else None
    if isinstance(
        error, (NoConnectionError, HTTPClientError, IncompleteReadError, HTTPError, OSError)
    ) or _lacks_credentials(error):
        return one_line(error)
    return None


def _lacks_credentials(error: Exception) -> bool:
    """Whether credentials could not be refreshed. Missing ones are refused before the first request, by `require_credentials`."""
    from botocore.exceptions import CredentialRetrievalError, MetadataRetrievalError, NoCredentialsError

    return isinstance(error, (CredentialRetrievalError, MetadataRetrievalError, NoCredentialsError))


def status_of(error: Exception) -> int:
    """Return the HTTP status of an answer that botocore raised as a ClientError; 0 for other errors."""
    response = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
