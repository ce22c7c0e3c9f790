"""Fast start of scripts: a script runs in a fork of a process that has imported the slow modules already."""

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ranks import forks

LIMIT_S = 300.0


def run_script(
    folder: Path, script: Path, arguments: Sequence[str], env: Mapping[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run `python script arguments...` with `env` added to the environment. Its output is written to files in `folder`."""
    out, err = folder / "stdout", folder / "stderr"
    process = forks().Process(
        target=_run, args=(str(script), list(arguments), {**os.environ, **env}, str(out), str(err))
    )
    process.start()
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"{script} does not end: {err.read_text()}")
    return subprocess.CompletedProcess([str(script), *arguments], process.exitcode, out.read_text(), err.read_text())


def _run(script: str, arguments: list[str], env: dict[str, str], out: str, err: str) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
