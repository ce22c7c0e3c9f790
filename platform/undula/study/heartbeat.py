"""The heartbeat of a study's driver: a file in the study's directory that shows whether a driver conducts the study now."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from undula.errors import RunError, StorageError
from undula.storage import Store

HEARTBEAT_FILE = "heartbeat.json"
INTERVAL_S = 10.0
"""Seconds between two heartbeats."""
SILENCE_S = 60.0
"""Age in seconds of a heartbeat from which on its driver counts as gone. Clocks of machines must differ by less."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a study's driver."""

    time: float
    """Seconds since the epoch."""
    machine: str = ""
    """Identifier of the machine's last boot and of its process namespace; empty if unknown."""
    process: int = 0
    """Process id of the driver, in that namespace."""


NEVER = Heartbeat(0.0)


@contextmanager
def keep_heartbeat(study: Store) -> Iterator[None]:
    """Write heartbeats while the block runs, and delete the file at its end. A driver that is killed leaves its last heartbeat."""
    closed, machine = threading.Event(), _machine()

    def beat() -> None:
        heartbeat = Heartbeat(time.time(), machine, os.getpid())
        with suppress(StorageError):  # a storage that fails shows in the trials, which need it
            study.write(HEARTBEAT_FILE, json.dumps(asdict(heartbeat)).encode())

    def beat_regularly() -> None:
        while not closed.wait(INTERVAL_S):
            beat()

    beat()
    thread = threading.Thread(target=beat_regularly, name="undula-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()
        with suppress(StorageError):
            study.delete(HEARTBEAT_FILE)


def has_driver(study: Store) -> bool:
    """Whether the study's driver wrote a heartbeat within the last SILENCE_S, and is not known to have ended since."""
    heartbeat = _read(study)
    return time.time() - heartbeat.time < SILENCE_S and not _has_ended(heartbeat)


def refuse_another_driver(study: Store) -> None:
    """Wait until a driver that is alive would have written another heartbeat; a killed driver writes none.

    Raises:
        RunError: another driver conducts the study.
    """
    if not has_driver(study):
        return
    before, deadline = _read(study).time, time.monotonic() + 3 * INTERVAL_S
    print(f"checking for {3 * INTERVAL_S:.0f} s whether the study's last driver is still running ...", flush=True)
    while has_driver(study) and time.monotonic() < deadline:
        if _read(study).time > before:
            raise RunError(
                f"{study.url} is being trained by another driver: wait for it, stop it, or give another name"
            )
        time.sleep(INTERVAL_S / 20)  # the interval between two looks at the storage


def _read(study: Store) -> Heartbeat:
    """The last heartbeat; NEVER if there is none that can be read."""
    try:
        return TypeAdapter(Heartbeat).validate_json(study.read(HEARTBEAT_FILE))
    except (StorageError, ValueError):
        return NEVER


def _machine() -> str:
    """Identifier of this machine's boot and of the process namespace, since containers number their processes themselves."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _has_ended(heartbeat: Heartbeat) -> bool:
    """Whether the driver is known to have ended: it was a process of this machine, and there is no such process now."""
    if not heartbeat.machine or heartbeat.machine != _machine():
        return False
    try:
        os.kill(heartbeat.process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's process, or a number that is no process id
        return False
    return False
