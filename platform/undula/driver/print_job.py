"""Resolution of a job by its script, which alone knows the defaults and the types of its own settings."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryFile

from undula.config.environment import OVERRIDES, without_secrets
from undula.driver.project import importable, project_modules
from undula.errors import SpecError


def printed_by_script(script: Path, job: Path, overrides: Sequence[str], project: Path | None = None) -> str:
    """Return what a job's script prints for `--print`: every value of the job with its origin.

    Raises:
        SpecError: The job is invalid, or the script cannot be run on this machine.
    """
    done = run_for_output(script, job, ["--print"], overrides, project)
    if done.returncode == 0:
        return done.stdout
    raise failure_of(done, f"{script} cannot be run on this machine, and only it can check its own settings")


def run_for_output(
    script: Path,
    job: Path,
    options: Sequence[str],
    overrides: Sequence[str],
    project: Path | None,
    see: Callable[[str], None] = lambda line: None,
) -> "subprocess.CompletedProcess[str]":
    """Run a job's script in a process of its own, and return the process with its output when it has ended.

    `see` is called with each line of its output as soon as it is there.
    """
    shown, private = without_secrets(overrides)
    file = str(job.absolute())  # the driver goes to the folder of the script
    command = [sys.executable, "-m", "undula.driver", str(script), "--config", file, *options, *shown]
    with importable(project_modules(script, project)) as path:
        env = {**os.environ, **path, OVERRIDES: private.get(OVERRIDES, "[]")}
        with (
            TemporaryFile("w+") as errors,
            subprocess.Popen(command, env=env, stdout=PIPE, stderr=errors, text=True) as process,
        ):
            lines = []
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    lines.append(line)
                    see(line)
                process.wait()
            except BaseException:  # the block would wait for the process
                process.kill()
                raise
            errors.seek(0)
            return subprocess.CompletedProcess(command, process.returncode, "".join(lines), errors.read())


def failure_of(done: "subprocess.CompletedProcess[str]", what: str) -> SpecError:
    """Return the error with which a script has ended: its sentence about the job, or else its last line with what has failed."""
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return SpecError(last.removeprefix("undula: ") if last.startswith("undula: ") else f"{what}: {last}")
