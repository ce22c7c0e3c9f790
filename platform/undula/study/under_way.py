"""Whether a study's driver is there, told by a file in the study's directory that it writes again and again."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from undula.errors import RunError, StorageError
from undula.storage import Store

UNDER_WAY_FILE = "under-way.json"
INTERVAL_S = 10.0
SILENCE_S = 60.0
"""After which a driver that has not been heard of is gone; clocks of machines differ by less."""


@contextmanager
def said_under_way(study: Store) -> Iterator[None]:
    """Say that the study is under way, for this block. A driver that is killed says nothing more."""
    over, here = threading.Event(), {"host": socket.gethostname(), "process": os.getpid()}

    def say() -> None:
        with suppress(StorageError):  # what trials lose by it they say themselves
            study.write(UNDER_WAY_FILE, json.dumps({**here, "time": time.time()}).encode())

    def say_regularly() -> None:
        while not over.wait(INTERVAL_S):
            say()

    say()
    thread = threading.Thread(target=say_regularly, name="undula-under-way", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(StorageError):
            study.delete(UNDER_WAY_FILE)


def is_under_way(study: Store) -> bool:
    """Whether the study's driver has been heard of in the last minute, and is not known to have gone since."""
    said = _said(study)
    return time.time() - said.get("time", 0.0) < SILENCE_S and not _is_gone(said)


def refuse_another_driver(study: Store) -> None:
    """Wait until a driver that may have been killed a moment ago would have said something.

    Raises:
        RunError: it has.
    """
    if not is_under_way(study):
        return
    before, deadline = _said(study).get("time", 0.0), time.monotonic() + 3 * INTERVAL_S
    print(f"looking for {3 * INTERVAL_S:.0f} s whether the study's last driver is still there ...", flush=True)
    while is_under_way(study) and time.monotonic() < deadline:
        if _said(study).get("time", 0.0) > before:
            raise RunError(
                f"{study.url} is being trained by another driver: wait for it, stop it, or give another name"
            )
        time.sleep(INTERVAL_S / 20)  # paces the looks


def _said(study: Store) -> dict[str, Any]:
    """What the driver has said last: its host, its process, and the time in seconds since the epoch. Nothing where it never did."""
    try:
        said = dict(json.loads(study.read(UNDER_WAY_FILE)))
        return {"host": str(said["host"]), "process": int(said["process"]), "time": float(said["time"])}
    except (StorageError, ValueError, KeyError, TypeError):
        return {}


def _is_gone(said: dict[str, Any]) -> bool:
    """Whether the driver was a process of this host, which is there no more."""
    if said.get("host") != socket.gethostname():
        return False
    try:
        os.kill(said["process"], 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        return False
    return False
