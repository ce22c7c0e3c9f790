"""Execution of a job's script in its driver. A script that starts no run would otherwise train there alone, and end as if all were well."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from undula.errors import UsageError
from undula.train.script_file import begin_call as begin_call

_has_begun = False


def note_begin() -> None:
    """Note that the script of this process has called an entry point that starts a run."""
    global _has_begun
    _has_begun = True


def has_begun() -> bool:
    """Return whether the script of this process has called an entry point that starts a run."""
    return _has_begun


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
