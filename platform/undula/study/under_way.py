"""Whether a study's driver is there, told by a file in the study's directory that it writes again and again."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from undula.errors import StorageError
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
    try:
        heard = float(json.loads(study.read(UNDER_WAY_FILE))["time"])
    except (StorageError, ValueError, KeyError, TypeError):
        return False
    return time.time() - heard < SILENCE_S
