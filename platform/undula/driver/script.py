"""Execution of a job's script in its driver. A script that starts no run would otherwise train there alone, and end as if all were well."""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from undula.errors import UsageError
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
    """Run the script of a submitted job, in the folder from which it was submitted if this machine has it, otherwise in the uploaded copy.

    Raises:
        UsageError: The script has ended, and has started no run.
    """
    here = Path(os.environ.get(FOLDER, script.parent), script.name)
    if here.is_file() and here.read_bytes() == script.read_bytes():
        # The settings are those of the submission, although their file here may have been edited since.
        settings = [script.parent / argument for argument in arguments]
        arguments = [
            str(file) if file.is_file() else argument for file, argument in zip(settings, arguments, strict=True)
        ]
        script = here
        os.chdir(script.parent)
    run_script(script, arguments)


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Do what `python script arguments...` does, in this process.

    Raises:
        UsageError: The script has ended, and has started no run.
    """
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code or _has_begun:
            raise
    if not _has_begun:
        raise UsageError(
            f"{script.name} has ended and started no run; end it with undula.main(train), or with launch(main) of "
            "undula.adapters.transformers, undula.adapters.accelerate or undula.adapters.lightning"
        )
