"""The run directory: the names of its files, its lock, and the deletion of a run."""

import errno
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from undula.errors import RunError, StorageError, SupersededError
from undula.state.attempts import ATTEMPTS, Lineage, begin, claim_number
from undula.state.commit import CHECKPOINTS
from undula.state.defaults import TENSORBOARD, TRACKERS
from undula.state.heartbeat import HEARTBEAT_FILE
from undula.state.ledger import recorded_attempts
from undula.state.ledger_files import LEDGER
from undula.storage import Store

JOB_FILE = "job.json"
STUDY_FILE = "study.json"
"""File in the directory that holds the runs of a study."""
FILES = "files"
"""Folder of a run directory with the files that the script has written to its working directory, if no other process sees them there."""
OUTPUT = "output"
"""Folder of a run directory with what the run has printed."""
RAY = "ray"
"""Folder of Ray Train's own files."""
REPORT = "report.html"
_LOCK = ".lock"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
"""Errors of file systems without locks. NFS, which turns them into locks of ranges, refuses one of a file that is open for reading."""


def job_record(store: Store) -> dict[str, Any]:
    """Read job.json of a run directory. The result is empty if the file is missing or damaged."""
    try:
        return dict(json.loads(store.read(JOB_FILE)))
    except (StorageError, ValueError, TypeError):
        return {}


def identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `id` of a run and its start time `began` in seconds since the epoch, given its record.

    If the record is empty, the id is new and the start time is now.
    """
    return {"id": str(record.get("id") or secrets.token_hex(8)), "began": float(record.get("began") or time.time())}


@contextmanager
def held(store: Store) -> Iterator[None]:
    """Lock a local run directory for this block, so that a job on another cluster of this machine cannot train in it.

    S3 and some file systems have no such lock. There, jobs of the same cluster are kept apart, and a job on another cluster takes over the
    run.

    Raises:
        RunError: Another job holds the lock, or this user may not read the lock of another user.
    """
    if store.is_s3 or sys.platform == "win32":
        yield
        return
    import fcntl

    file = Path(store.path(_LOCK))
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _opened_lock(file)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another job is training in {store.url}; wait for it, stop it, or set another name"
            ) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


def _opened_lock(file: Path) -> int:
    """Open a lock, which may be another user's. To read it is enough to hold it."""
    try:
        try:
            return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        raise RunError(f"{file} belongs to another user and is not readable; set another name, or delete it") from None


def require_newest_submission(store: Store, submission: str) -> None:
    """Check that the run was not submitted again since a submission. A submission without a name is not checked.

    Raises:
        SupersededError: It was.
    """
    if submission and job_record(store).get("submission", submission) != submission:
        raise SupersededError(
            f"the run in {store.url} was submitted again, so this older job ends; follow the newer job, or stop it and submit "
            "this one again"
        )


def delete_run(store: Store) -> None:
    """Delete a run: the files that Undula wrote into its directory, and no others.

    The numbers of its attempts are kept, so that workers that are still training it cannot add anything to the next run.

    Raises:
        RunError: The directory holds other files but no run.
    """
    names = {entry.name.partition("/")[0] for entry in store.list()} - {_LOCK}
    if names and names.isdisjoint({JOB_FILE, LEDGER, ATTEMPTS}):
        raise RunError(
            f"{store.url} holds {sorted(names)[0]!r} but no run, so --fresh does not delete it; set another name"
        )
    recorded = recorded_attempts(store)
    if recorded or ATTEMPTS in names:
        # A damaged record of the former attempts must not matter.
        number = claim_number(store, recorded)
        begin(store, number, Lineage(unrecorded=0), step=0, checkpoints=())
    for name in (JOB_FILE, LEDGER, CHECKPOINTS, FILES, OUTPUT, TENSORBOARD, TRACKERS, RAY, REPORT, HEARTBEAT_FILE):
        store.delete(name)
