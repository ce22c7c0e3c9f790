"""Memory for the snapshots of a test process, in place of the one that all processes of this machine share.

A run counts the snapshots of all other runs before it takes room for its own. After thousands of tests it would count for longer than it
trains. Undula reads the variable when it is imported, so this module comes before it.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

PARENT = os.environ.get("UNDULA_MEMORY", "/dev/shm")
FOLDER = Path(tempfile.mkdtemp(prefix="undula-tests-", dir=PARENT if Path(PARENT).is_dir() else None))
OWNER = os.getpid()
os.environ["UNDULA_MEMORY"] = str(FOLDER)


def delete_snapshots() -> None:
    """Delete the snapshots of all runs, but not those of the nodes of clusters, which have folders of their own."""
    shutil.rmtree(FOLDER / f"undula-{os.getuid()}", ignore_errors=True)


@atexit.register
def _delete() -> None:
    if os.getpid() == OWNER:  # not in a fork
        shutil.rmtree(FOLDER, ignore_errors=True)
