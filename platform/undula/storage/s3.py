"""Clients of S3. All of a process come from one botocore session, so that credentials, region, endpoint and proxy are resolved once."""

import os
import threading
from functools import cache
from typing import Any

from undula.errors import StorageError

DEFAULT_REGION = "us-east-1"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0
"""Maximum time in seconds to the first byte and between two bytes of a response."""
MOST_CONNECTIONS = 64
"""Maximum number of connections that a client keeps open."""

_lock = threading.Lock()  # a session must not be used by two threads at once; clients can


def s3_client(anonymous: bool) -> Any:
    """Return the botocore client of this process. It sends each request once: `undula.storage.retries` repeats them.

    Args:
        anonymous: Whether requests are unsigned, as public buckets allow.
    """
    with _lock:
        return _client(anonymous)


def forget_clients() -> None:
    """Drop the session and its clients, so that the next request resolves everything again."""
    with _lock:
        _client.cache_clear()
        _session.cache_clear()


def require_credentials(url: str) -> None:
    """Check that there are credentials, without a request to S3.

    Raises:
        StorageError: There are none, or their configuration is wrong.
    """
    from botocore.exceptions import BotoCoreError

    try:
        with _lock:
            has_credentials = _session().get_credentials() is not None
    except BotoCoreError as error:
        raise StorageError(f"cannot use {url}: {error}") from error
    if not has_credentials:
        forget_clients()  # they may be there when somebody asks again
        raise StorageError(
            f"no AWS credentials were found for {url}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
            "or give the nodes an instance profile"
        )


@cache
def _session() -> Any:
    from botocore.session import Session

    session = Session()
    session.register_component("data_loader", _data_loader())
    # botocore reads AWS_DEFAULT_REGION and the profile's region, but not AWS_REGION. STS needs the region too.
    region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or DEFAULT_REGION
    session.set_config_variable("region", region)
    # Nothing here reads the times of objects, and dateutil would take longer for them than all the rest of a page of a listing.
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_as_is)
    return session


def _as_is(value: Any) -> Any:
    return value


@cache
def _data_loader() -> Any:
    """Return botocore's loader of the models of services, which keeps them in memory. Parsing them takes most of the time for a client."""
    from botocore.loaders import create_loader

    return create_loader()


@cache
def _client(anonymous: bool) -> Any:
    from botocore import UNSIGNED
    from botocore.config import Config

    config = Config(
        retries={"total_max_attempts": 1},
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=MOST_CONNECTIONS,
        request_checksum_calculation="when_required",  # not every S3 server accepts botocore's form of checksums
        signature_version=UNSIGNED if anonymous else None,
    )
    return _session().create_client("s3", config=config)
