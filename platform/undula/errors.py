"""Every error that Undula raises on purpose.

    UndulaError
    ├── SpecError          a job's YAML or an override: the file, the key, what was given, what is accepted
    ├── StorageError       a URL that cannot be read or written
    ├── ManifestError      a data set that is not what its manifest says
    ├── CheckpointError    a checkpoint that does not fit, or is not whole
    ├── RunError           a run that cannot go on under this name, or with these settings
    ├── ClusterError       a Ray cluster that cannot be reached or started
    └── UsageError         a script that uses the API wrongly, or asks for what no engine can do; the job ends at once

Each message is one sentence for the person at the terminal: where, what was found, and how to mend it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UndulaError(Exception):
    """Base of all errors with a message meant for the user."""


class SpecError(UndulaError):
    """A job's YAML or an override is not acceptable."""


class StorageError(UndulaError):
    """A URL cannot be read or written."""


class ManifestError(UndulaError):
    """A data set is not what its manifest says, or has none."""


class CheckpointError(UndulaError):
    """A checkpoint does not fit the model, or is not whole."""


class RunError(UndulaError):
    """A run cannot go on under this name, or with these settings."""


class ClusterError(UndulaError):
    """A Ray cluster cannot be reached or started."""


class UsageError(UndulaError):
    """A script uses the API wrongly, or asks for what no engine can do. Trying again would not help."""


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Import what an extra of the package brings; SpecError where it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = str(error.name).split(".")[0]
        raise SpecError(f"{module} is not installed: pip install 'undula[{name}]'") from error


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn an UndulaError into its sentence on stderr and exit status 2; everything else passes."""
    try:
        yield
    except UndulaError as error:
        print(f"undula: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
