"""Environment variables of a job that appear in no list of jobs, log or file, such as secrets.

The submitter stores them in the memory of the cluster's head, in place of a package. Each process of the job, its driver included, takes
them from there when it starts, before it imports anything of the job. The driver deletes them when it ends. On a cluster of its own, the
driver has got them already, and stores them itself.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from secrets import token_hex
from typing import Any

from undula.masking.output import mask_output
from undula.masking.values import NAMES as SECRETS
from undula.masking.values import declared, with_declared

URI = "UNDULA_PRIVATE"
"""Environment variable with the name of the package, which the lists of jobs may show: only processes of the cluster can read it."""
NAMES = "UNDULA_PRIVATE_NAMES"
"""Environment variable of a driver with the names of the variables that it has itself and that its workers are to take, as a JSON list."""
HOOK = f"{__name__}.take"


def new_package() -> str:
    """Return the name of a new package, whose URI is gcs://NAME."""
    return f"_ray_pkg_{token_hex(16)}.zip"


def packed(variables: Mapping[str, str]) -> bytes:
    """Return the content of the package with these variables."""
    return json.dumps(dict(variables)).encode()


def variables_for(package: str) -> dict[str, str]:
    """Return the environment variables with which the processes of a job take the variables of a package.

    Ray does not run the hook of a job in its supervisor, which starts the driver, unless the variable is set with which it passes the hook
    to other processes.
    """
    variable = import_module("ray._private.ray_constants").WORKER_PROCESS_SETUP_HOOK_ENV_VAR
    return {URI: f"gcs://{package}", variable: HOOK}


def names_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable with which a driver that has these variables passes them on to its workers."""
    return {NAMES: json.dumps([*variables])} if variables else {}


@contextmanager
def passed_on() -> Iterator[dict[str, str]]:
    """Yield the environment variables of the workers of this driver, which connects in the block. Then they can take its variables."""
    names, known = names_for_workers(), with_declared(os.environ, declared())
    if not names:
        yield {}
        return
    package = new_package()
    yield variables_for(package)
    os.environ.pop(NAMES, None)
    os.environ[URI] = f"gcs://{package}"
    _storage()._internal_kv_put(os.environ[URI], packed({name: known[name] for name in names}))


def names_for_workers() -> list[str]:
    """Return the names of the variables that this driver must pass on to its workers; none if the submitter has stored them."""
    names = [] if URI in os.environ else json.loads(os.environ.get(NAMES, "[]"))
    return [*names, *declared(), SECRETS] if declared() and URI not in os.environ else names


def take() -> None:
    """Set the variables of the job in this process, which Ray has just started, and mask those that are secrets in what it prints.

    Raises:
        RuntimeError: The head has no such variables any more. Ray then ends this process.
    """
    content = _storage()._internal_kv_get(os.environ[URI])
    if content is None:
        raise RuntimeError("the job has ended, and its environment variables were deleted")
    os.environ.update(json.loads(content))
    mask_output()


def forget() -> None:
    """Delete the variables of this job from the head, if it has any. This process must be connected to the cluster."""
    if uri := os.environ.pop(URI, None):
        _storage()._internal_kv_del(uri)


def _storage() -> Any:
    return import_module("ray.experimental.internal_kv")
