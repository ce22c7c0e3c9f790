"""Heartbeat of the driver of a run or study: a file in its directory that shows whether a driver is running."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from undula.errors import RunError, StorageError
from undula.state.processes import ProcessIdentity, is_known_to_have_ended, own_identity
from undula.storage import Store

HEARTBEAT_FILE = "heartbeat.json"
INTERVAL_S = 10.0
"""Time in seconds between two heartbeats."""
SILENCE_S = 60.0
"""Maximum age in seconds of the heartbeat of a driver that counts as running. The clocks of machines must differ by less."""


@dataclass(frozen=True)
class Heartbeat:
    """Heartbeat of a driver."""

    time: float
    """Time of the heartbeat in seconds since the epoch; ENDED if the driver has ended."""
    driver: ProcessIdentity | None = None
    """Process of the driver; None if unknown."""


ENDED = 0.0
NEVER = Heartbeat(0.0)


@contextmanager
def keep_heartbeat(store: Store) -> Iterator[None]:
    """Write heartbeats during this block, and a last one at its end, which says that the driver has ended.

    If the driver is killed, its last heartbeat remains and becomes too old.

    Args:
        store: Directory of the run or study.
    """
    closed, driver = threading.Event(), own_identity()

    def write(heartbeat: Heartbeat) -> None:
        with suppress(StorageError):  # the training reports a failure of the storage
            store.write(HEARTBEAT_FILE, json.dumps(asdict(heartbeat)).encode())

    def beat_regularly() -> None:
        while not closed.wait(INTERVAL_S):
            write(Heartbeat(time.time(), driver))

    write(Heartbeat(time.time(), driver))
    thread = threading.Thread(target=beat_regularly, name="undula-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()
        write(Heartbeat(ENDED, driver))


def has_driver(store: Store) -> bool:
    """Return whether the driver wrote a heartbeat within the last SILENCE_S seconds and is not known to have ended."""
    return bool(driver_state(store))


def driver_state(store: Store) -> bool | None:
    """Return whether a driver is running, or None if there is no heartbeat, as in the folders of packed trials."""
    heartbeat = _read(store)
    if heartbeat == NEVER:
        return None
    return time.time() - heartbeat.time < SILENCE_S and not _has_ended(heartbeat)


def refuse_another_driver(study: Store) -> None:
    """Wait for another heartbeat of the study's last driver, in case it is still running.

    Raises:
        RunError: Another driver is running.
    """
    if not has_driver(study):
        return
    before, deadline = _read(study).time, time.monotonic() + 3 * INTERVAL_S
    print(f"checking for {3 * INTERVAL_S:.0f} s whether the study's last driver is still running ...", flush=True)
    while has_driver(study) and time.monotonic() < deadline:
        if _read(study).time > before:
            raise RunError(
                f"{study.url} is being trained by another driver; wait for it, stop it, or give the study another name"
            )
        time.sleep(INTERVAL_S / 20)


def _read(store: Store) -> Heartbeat:
    """Return the last heartbeat, or NEVER if none can be read."""
    try:
        return TypeAdapter(Heartbeat).validate_json(store.read(HEARTBEAT_FILE))
    except (StorageError, ValueError):
        return NEVER


def _has_ended(heartbeat: Heartbeat) -> bool:
    """Return whether the driver is known to have ended, because it was a process of this machine that no longer exists."""
    return heartbeat.driver is not None and is_known_to_have_ended(heartbeat.driver)
