"""Errors that Undula raises on purpose.

    UndulaError
    ├── SpecError          a setting in a YAML file or on the command line is invalid
    ├── StorageError       a URL cannot be read or written
    │   └── UnavailableError   the store is busy or full, or cannot be reached; the same request may succeed later
    ├── ManifestError      a data set has no manifest or does not match it
    ├── CheckpointError    a checkpoint is damaged or does not fit the model
    ├── RunError           a run cannot continue under this name or with these settings
    │   └── SupersededError  a newer attempt of the run exists; the job ends at once
    ├── ClusterError       a Ray cluster cannot be reached or started, or one of its nodes cannot train
    │   └── ConnectionLostError  the connection to a submitted job is lost; the job may train on
    ├── ConformanceError   a model or an optimizer does not resume exactly
    └── UsageError         a script uses the API wrongly or asks for something that no engine supports; the job ends at once

Each message is one sentence for the user: the place (file, key or URL), the problem, and the fix.
The module also holds the settings with which every spec refuses what it does not know, and the versions of other libraries that are not
refused.
"""

import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

if TYPE_CHECKING:
    from pydantic import ConfigDict

FAILED, WRONG_INPUT, NO_CLUSTER, CONNECTION_LOST, INTERRUPTED, TERMINATED = 1, 2, 3, 4, 130, 143
"""Exit statuses of commands and drivers: training or a check failed, the input is wrong, the cluster cannot be reached or used, the
connection is lost while the job may train on, Ctrl-C, and SIGTERM. docs/jobs.md lists them for users."""
STRICT: "ConfigDict" = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}
"""pydantic's settings for every spec: unknown keys and numbers that are not finite are refused."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of the names of runs and studies."""
TESTED: Mapping[str, tuple[str, str]] = {
    "transformers": ("4.57", "5.24"),
    "accelerate": ("1.6", "1.15"),
    "pytorch-lightning": ("2.5", "2.6"),
    "lightning": ("2.5", "2.6"),
    "ray": ("2.58", "2.60"),
}
"""Oldest and newest minor version of each library whose private names Undula uses. `make versions` tests both."""
_COMPROMISED = {(library, version) for library in ("pytorch-lightning", "lightning") for version in ("2.6.2", "2.6.3")}
"""Versions that an attacker has published."""


@dataclass(frozen=True)
class Finding:
    """Problem that a command has found in a configuration, a cluster or a data set."""

    severity: Literal["error", "warning"]
    """An error costs money, data or security, or stops training. A warning costs speed or memory."""
    message: str
    """Sentence with the place, the problem and the fix."""


class UndulaError(Exception):
    """Base class of all errors with a message for the user."""

    status: ClassVar[int] = WRONG_INPUT
    """Exit status of a command that ends with this error."""


class SpecError(UndulaError):
    """A setting in a YAML file or on the command line is invalid."""


class StorageError(UndulaError):
    """A URL cannot be read or written."""


class UnavailableError(StorageError):
    """The store is busy or full, or cannot be reached. The same request may succeed later."""

    status = FAILED


class ManifestError(UndulaError):
    """A data set has no manifest or does not match it."""


class CheckpointError(UndulaError):
    """A checkpoint is damaged or does not fit the model."""


class RunError(UndulaError):
    """A run cannot continue under this name or with these settings."""


class SupersededError(RunError):
    """A newer attempt of the run exists, in another job or in a group that has replaced this one."""


class ClusterError(UndulaError):
    """A Ray cluster cannot be reached or started, or one of its nodes cannot train."""

    status = NO_CLUSTER


class ConnectionLostError(ClusterError):
    """The connection to a submitted job is lost. The job may train on."""

    status = CONNECTION_LOST


class ConformanceError(UndulaError):
    """A training that was interrupted differs from the one that was not, for the model and the optimizer that were tested."""

    status = FAILED


class UsageError(UndulaError):
    """A script uses the API wrongly or asks for something that no engine supports. Another attempt would fail too."""


class StoppedExit(SystemExit):
    """End of this process by a signal, which no script has asked for."""


def end_on_sigterm(status: int = INTERRUPTED) -> None:
    """End this process with an exception on SIGTERM, so that blocks clean up: the secrets of a stopped job must not stay on the head."""

    def stop(*_: object) -> NoReturn:
        raise StoppedExit(status)

    signal.signal(signal.SIGTERM, stop)


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks; the name of its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Import modules of an optional dependency in this block.

    Raises:
        SpecError: The extra `name` of the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = str(error.name).split(".")[0]
        raise SpecError(f"{module} is not installed; run pip install 'undula[{name}]'") from error


def require_tested(*libraries: str) -> None:
    """Check the versions of those libraries that are installed, without importing them.

    Raises:
        SpecError: One of them has a version with which Undula is not tested.
    """
    from importlib.metadata import PackageNotFoundError, version  # which takes as long to import as a command to start

    for library in libraries:
        try:
            installed = version(library)
        except PackageNotFoundError:
            continue
        oldest, newest = TESTED[library]
        fix = f"run pip install '{library}=={newest}.*'"
        if (library, installed) in _COMPROMISED:
            raise SpecError(
                f"{library} {installed} is installed, which an attacker has published; remove it, and {fix}"
            )
        if not _minor(oldest) <= _minor(installed) <= _minor(newest):
            raise SpecError(
                f"{library} {installed} is installed, but Undula is tested with {oldest} to {newest}; {fix}"
            )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@contextmanager
def one_sentence() -> Iterator[None]:
    """Print the message of an UndulaError in this block to stderr and exit with its status. Other exceptions are not caught."""
    try:
        yield
    except UndulaError as error:
        print(f"undula: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.status) from None
