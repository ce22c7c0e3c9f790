"""Execution of a job's script in its driver. A script that starts no run would otherwise train there alone, and end as if all were well."""

import filecmp
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from undula.errors import UsageError
from undula.train.launched_habits import refusal_of
from undula.train.launched_habits import refuse_process_group as refuse_process_group
from undula.train.left_out import note_left_out
from undula.train.script_call import begin_call as begin_call

FOLDER = "UNDULA_FOLDER"
"""Environment variable of a submitted job with the path of the script's folder on the machine from which it was submitted."""
_has_begun = False


def note_begin() -> None:
    """Note that the script of this process has called an entry point that starts a run."""
    global _has_begun
    _has_begun = True


def has_begun() -> bool:
    """Return whether the script of this process has called an entry point that starts a run."""
    return _has_begun


def run_submitted(script: Path, arguments: Sequence[str]) -> None:
    """Run the script of a submitted job in its folder: the one from which it was submitted, or else the uploaded copy.

    A folder of this machine with the same path is taken only if it has every uploaded file, because another machine may have submitted it.

    Raises:
        UsageError: The script has ended, and has started no run.
    """
    here = Path(os.environ.get(FOLDER, script.parent))
    if here != script.parent and _has_files_of(script.parent, here):
        script = here / script.name
    os.chdir(script.parent)
    run_script(script, arguments)


def _has_files_of(copy: Path, folder: Path) -> bool:
    """Return whether a folder has each file of a copy with the same content."""
    files = [file.relative_to(copy) for file in copy.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return all((folder / name).is_file() and filecmp.cmp(copy / name, folder / name, shallow=False) for name in files)


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Do what `python script arguments...` does, in this process.

    Raises:
        UsageError: The script has ended, and has started no run.
    """
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except (Exception, SystemExit) as error:
        if not _has_begun and (refusal := refusal_of(error)):
            raise refusal from error
        note_left_out(error)
        if _has_begun or not isinstance(error, SystemExit) or error.code:
            raise
    if not _has_begun:
        raise UsageError(
            f"{script.name} has ended and started no run; end it with undula.main(train), or with launch(main) of "
            "undula.adapters.transformers, undula.adapters.accelerate or undula.adapters.lightning"
        )
