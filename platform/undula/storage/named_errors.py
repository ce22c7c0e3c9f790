"""Errors of the operating system and of S3 as StorageErrors, which name the file."""

from collections.abc import Iterator
from contextlib import contextmanager

from undula.errors import StorageError


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
        raise StorageError(f"cannot {verb} {where}: {detail}") from error


def _is_of_storage(error: Exception) -> bool:
    if isinstance(error, (OSError, MissingError, ChangedError)):
        return True
    from botocore.exceptions import BotoCoreError, ClientError  # imported when S3 may be in use, because it takes time
    from urllib3.exceptions import HTTPError

    return isinstance(error, (BotoCoreError, ClientError, HTTPError))
