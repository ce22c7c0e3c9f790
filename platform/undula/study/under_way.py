"""Whether a study's driver is there, told by a file in the study's directory that it writes again and again."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from undula.errors import RunError, StorageError
from undula.storage import Store

UNDER_WAY_FILE = "under-way.json"
INTERVAL_S = 10.0
SILENCE_S = 60.0
"""After which a driver that has not been heard of is gone; clocks of machines differ by less."""


@contextmanager
def said_under_way(study: Store) -> Iterator[None]:
    """Say that the study is under way, for this block. A driver that is killed says nothing more."""
    over = threading.Event()

    def say() -> None:
        with suppress(StorageError):  # what trials lose by it they say themselves
            study.write(UNDER_WAY_FILE, json.dumps({"time": time.time()}).encode())

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
    """Whether the study's driver has been heard of in the last minute."""
    return time.time() - _heard(study) < SILENCE_S


def refuse_another_driver(study: Store) -> None:
    """Wait until a driver that may have been killed a moment ago would have said something.

    Raises:
        RunError: it has.
    """
    if not is_under_way(study):
        return
    before, deadline = _heard(study), time.monotonic() + 3 * INTERVAL_S
    print(f"looking for {3 * INTERVAL_S:.0f} s whether the study's last driver is still there ...", flush=True)
    while is_under_way(study) and time.monotonic() < deadline:
        if _heard(study) > before:
            raise RunError(
                f"{study.url} is being trained by another driver: wait for it, stop it, or give another name"
            )
        time.sleep(INTERVAL_S / 20)  # paces the looks


def _heard(study: Store) -> float:
    """When the driver was heard of, in seconds since the epoch; 0 where it never was."""
    try:
        return float(json.loads(study.read(UNDER_WAY_FILE))["time"])
    except (StorageError, ValueError, KeyError, TypeError):
        return 0.0
