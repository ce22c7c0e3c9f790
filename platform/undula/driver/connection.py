"""Connection of the driver to Ray, and the shipping of the script's modules to the workers."""

import atexit
import gc
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

from undula.cluster.local import STARTS
from undula.data.script.pickling import modules_of, pickle_modules_by_name
from undula.elastic.ray import private_environment
from undula.elastic.ray.ray_logging import stop_error_messages
from undula.errors import ClusterError, UsageError, one_line
from undula.train.run import Run
from undula.train.script_file import ScriptFile

POLL_S = 0.05
CONNECT_TIMEOUT_S = 10.0
"""Maximum time in seconds to reach the cluster's address."""
SET_TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file of its token"
"""Fix where a cluster rejects a command without its token, for messages."""


@contextmanager
def connected() -> Iterator[None]:
    """Connect to a Ray cluster for the duration of a block: the one at RAY_ADDRESS, or else the one on this machine.

    Ray's logs stay in Ray's log files.

    Raises:
        ClusterError: The cluster cannot be reached.
        UsageError: The script has connected already, so its workers cannot get the job's environment variables.
    """
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # the hub carries printed lines to the driver
    # Without this, the interpreter spends more than a second at exit on collecting torch's objects.
    atexit.register(gc.freeze)
    was_connected = ray.is_initialized()
    if not was_connected:
        address = os.environ.get("RAY_ADDRESS", "")
        if address.startswith("ray://"):
            raise ClusterError(
                f"RAY_ADDRESS is {address}, the address of Ray Client, through which a run cannot train; submit the job with `undula run "
                "--address http://HOST:8265`, or set RAY_ADDRESS to HOST:6379 on a node of the cluster"
            )
        try:
            _await_start()
            if re.fullmatch(r"[^/]+:\d+", address):  # Ray's own attempts would take a minute
                socket.create_connection(address.rsplit(":", 1), timeout=CONNECT_TIMEOUT_S).close()  # type: ignore[arg-type]
            with private_environment.passed_on() as variables:
                ray.init(
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env={"env_vars": variables} if variables else None,
                )
        except (OSError, ray.exceptions.RayError) as error:
            where, token = address or "on this machine", ""
            if os.environ.get("RAY_AUTH_MODE") != "token":
                token = f"; if the cluster wants a token, {SET_TOKEN}"
            raise ClusterError(
                f"cannot connect to the Ray cluster {where}: {one_line(error)}; check that it is up and that RAY_ADDRESS is "
                f"correct{token}"
            ) from error
        stop_error_messages()
    elif names := private_environment.names_for_workers():
        raise UsageError(
            f"the script has connected to Ray before undula.main, so its workers cannot get the variable {names[0]}; remove its ray.init()"
        )
    for name in ("ray", "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        if not was_connected:
            private_environment.forget()
            ray.shutdown()  # Ray's own shutdown at exit would wait half a second for logs


def _await_start() -> None:
    """Wait for a cluster that was started with this process, which is ended if the cluster does not start.

    Ray's own attempts end after a minute.
    """
    if raylet := os.environ.pop(STARTS, None):
        while not Path(raylet).exists():
            time.sleep(POLL_S)


@contextmanager
def private_environment_of_job() -> Iterator[None]:
    """Delete the private environment variables of the job from the cluster at the end of a block, also if it has not connected."""
    try:
        yield
    finally:
        if private_environment.URI in os.environ:
            with suppress(ClusterError), connected():
                pass  # the end of the connection deletes them


def for_workers(train: Callable[[Run], None]) -> Callable[[Run], None]:
    """Return the script of this process, which workers execute, in place of its train function.

    A train function without a file, such as that of a notebook, is pickled with the modules beside it, because a worker may not have them.
    """
    pickle_modules_by_name()
    if script := ScriptFile.of_this_process():
        return script
    for module in modules_of(Path(sys.argv[0]).resolve().parent):
        ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return train
