"""Errors of the operating system and of S3 as StorageErrors, which name the file."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from undula.errors import StorageError, UnavailableError

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
