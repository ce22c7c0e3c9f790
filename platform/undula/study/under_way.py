"""Whether a study's driver is there, told by a file in the study's directory that it writes again and again."""

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

UNDER_WAY_FILE = "under-way.json"
INTERVAL_S = 10.0
SILENCE_S = 60.0
"""After which a driver that has not been heard of is gone; clocks of machines differ by less."""


@dataclass(frozen=True)
class Sign:
    """Of life of a study's driver."""

    time: float
    """Seconds since the epoch."""
    machine: str = ""
    """Names the machine, and its processes' numbering; empty where that is not known."""
    process: int = 0


NONE = Sign(0.0)


@contextmanager
def said_under_way(study: Store) -> Iterator[None]:
    """Say that the study is under way, for this block. A driver that is killed says nothing more."""
    over, machine = threading.Event(), _machine()

    def say() -> None:
        sign = Sign(time.time(), machine, os.getpid())
        with suppress(StorageError):  # what trials lose by it they say themselves
            study.write(UNDER_WAY_FILE, json.dumps(asdict(sign)).encode())

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
    sign = _heard(study)
    return time.time() - sign.time < SILENCE_S and not _is_gone(sign)


def refuse_another_driver(study: Store) -> None:
    """Wait until a driver that may have been killed a moment ago would have said something.

    Raises:
        RunError: it has.
    """
    if not is_under_way(study):
        return
    before, deadline = _heard(study).time, time.monotonic() + 3 * INTERVAL_S
    print(f"looking for {3 * INTERVAL_S:.0f} s whether the study's last driver is still there ...", flush=True)
    while is_under_way(study) and time.monotonic() < deadline:
        if _heard(study).time > before:
            raise RunError(
                f"{study.url} is being trained by another driver: wait for it, stop it, or give another name"
            )
        time.sleep(INTERVAL_S / 20)  # paces the looks


def _heard(study: Store) -> Sign:
    """What was heard of the driver last."""
    try:
        return TypeAdapter(Sign).validate_json(study.read(UNDER_WAY_FILE))
    except (StorageError, ValueError):
        return NONE


def _machine() -> str:
    """This start of this machine, and the namespace of this process' number: containers have their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _is_gone(sign: Sign) -> bool:
    """Whether the driver was a process of this machine which is there no more."""
    if not sign.machine or sign.machine != _machine():
        return False
    try:
        os.kill(sign.process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # of another user, or no process at all
        return False
    return False
