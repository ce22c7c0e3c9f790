"""Repetition of requests while a store is busy or cannot be reached."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from undula.errors import one_line
from undula.storage.reports import Wait, report_failure
from undula.storage.s3 import forget_clients

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
