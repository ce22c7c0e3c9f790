"""What a job's driver does before it trains: connect to Ray, and send the script's own modules along."""

import atexit
import gc
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import ray

from undula.elastic.ray.ray_logging import stop_error_messages
from undula.errors import ClusterError

CONNECT_TIMEOUT_S = 10.0
INTERRUPTED = 130
"""Exit status of a driver that was stopped from outside."""


@contextmanager
def connected() -> Iterator[None]:
    """Be connected to the cluster that RAY_ADDRESS names, or to the one on this machine; Ray's own talk stays in its log files.

    Raises:
        ClusterError: there is none.
    """
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # the hub brings what is printed
    # Or the interpreter's end looks for garbage among all that torch has, for more than a second.
    atexit.register(gc.freeze)
    was_connected = ray.is_initialized()
    if not was_connected:
        address = os.environ.get("RAY_ADDRESS", "")
        try:
            if re.fullmatch(r"[^/]+:\d+", address):  # where nothing listens, Ray takes a minute to say so
                socket.create_connection(address.rsplit(":", 1), timeout=CONNECT_TIMEOUT_S).close()  # type: ignore[arg-type]
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ray.exceptions.RayError) as error:
            where = address or "on this machine"
            raise ClusterError(f"cannot connect to the Ray cluster {where}: {' '.join(str(error).split())}") from error
        stop_error_messages()
    for name in ("ray", "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        if not was_connected:
            ray.shutdown()  # at the interpreter's end it waits half a second for logs


def ship_modules_beside_the_script() -> None:
    """Send what the script imports from its own folder along with the train function: on a worker that folder may be elsewhere."""
    folder = str(Path(sys.argv[0]).resolve().parent)
    real = cache(os.path.realpath)  # of the thousands of modules that torch has, few lie in folders of their own
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and file and real(Path(file).parent) == folder:
            ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
