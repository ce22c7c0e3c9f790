"""Files beside the script that were not sent to the cluster: an error about one of them says so."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

LEFT_OUT = "UNDULA_LEFT_OUT"
"""Environment variable of a submitted job with the script's folder on the machine of the user, and the paths in it that were not sent, as
JSON."""
MOST_NAMES = 100
"""Maximum number of paths in the variable."""


def left_out(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the environment variable of a job for whose script these paths in a folder were not sent."""
    return {LEFT_OUT: json.dumps([str(folder), *names[:MOST_NAMES]])} if names else {}


def note_left_out(error: BaseException) -> None:
    """Add a note to an error of a script about a file or a module that was not sent. It does nothing where the script's folder is seen."""
    folder, *names = json.loads(os.environ.get(LEFT_OUT, "[null]"))
    here = {Path.cwd(), Path(sys.argv[0]).absolute().parent}
    if not names or Path(folder) in here:
        return
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str | bytes):
        missing = os.fsdecode(error.filename)
    elif isinstance(error, ModuleNotFoundError) and error.name:
        missing = f"{error.name.replace('.', '/')}.py"
    else:
        return
    paths = [os.path.relpath(base / missing, base) for base in (*here, Path(folder))]
    for name in names:
        if any(f"{path}/".startswith(f"{name}/") or path == f"{name}.py" for path in paths):
            error.add_note(
                f".gitignore names {name}, so it was not sent to the cluster; see 'Packages and files' in docs/jobs.md"
            )
            return
