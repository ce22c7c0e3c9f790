"""The run directory: what lies in it, who may write to it, and how it is emptied."""

import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from undula.errors import RunError, StorageError
from undula.state.commit import CHECKPOINTS
from undula.state.ledger import LEDGER
from undula.storage import Store

JOB_FILE = "job.json"
STUDY_FILE = "study.json"
"""In a directory of runs that a study makes."""
TENSORBOARD = "tensorboard"
RAY = "ray"
"""Ray Train's own notes."""
REPORT = "report.html"
_LOCK = ".lock"


def job_record(store: Store) -> dict[str, Any]:
    """What job.json of a run directory says; nothing where there is none, or one that is damaged."""
    try:
        return dict(json.loads(store.read(JOB_FILE)))
    except (StorageError, ValueError, TypeError):
        return {}


def identity(store: Store) -> dict[str, Any]:
    """`id` of the run in a directory, and when it `began`, in seconds since the epoch; new ones where there is none."""
    record = job_record(store)
    return {"id": str(record.get("id") or secrets.token_hex(8)), "began": float(record.get("began") or time.time())}


@contextmanager
def held(store: Store) -> Iterator[None]:
    """Hold a local run directory for this block, against jobs on other clusters of this machine; RunError where another holds it.

    On S3 there is no such lock: there one cluster's jobs are kept apart, and no others.
    """
    if store.is_s3 or sys.platform == "win32":
        yield
        return
    import fcntl

    file = Path(store.path(_LOCK))
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(
            f"{store.url} is being trained by another job: wait for it, stop it, or give another name"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


def forget(store: Store) -> None:
    """Delete a run: what we put into its directory, and nothing else. RunError where the directory holds other things alone."""
    names = {entry.name.partition("/")[0] for entry in store.list()} - {_LOCK}
    if names and JOB_FILE not in names and LEDGER not in names:
        raise RunError(
            f"{store.url} holds {sorted(names)[0]!r} and no run: --fresh deletes runs alone; give another name"
        )
    for name in (JOB_FILE, LEDGER, CHECKPOINTS, TENSORBOARD, RAY, REPORT):
        store.delete(name)
