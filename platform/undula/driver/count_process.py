"""Count of a job's steps in a process of its own, which executes the script as a worker does and cannot disturb the driver."""

import base64
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, Any

from undula.cluster.local import before_exec
from undula.state.processes import POLL_INTERVAL_S, end_group, is_alive
from undula.train.dry_run.counting import Count, Setting
from undula.train.job import Job
from undula.train.script_file import ScriptFile

LIMIT_S = 60.0
"""Maximum seconds from the start of the process to its count."""
_LOG = logging.getLogger("undula")
_UNKNOWN = "the memory of a step is not known in advance: %s"
MARK = "undula count: "
"""Beginning of the line of a process's output that has its result."""


@contextmanager
def counting(
    script: ScriptFile, job: Job, settings: Sequence[Setting], limit_s: float = LIMIT_S
) -> Iterator[Callable[[], Count | None]]:
    """Count steps of a job in a process that ends with the block at the latest. It sees no GPU, and its output is not shown.

    Args:
        script: Script of the job.
        job: The job.
        settings: Settings of the steps.
        limit_s: Maximum seconds for the count.

    Yields:
        Function that waits for the count, and returns None if the script fails or takes too long.
    """
    deadline = time.monotonic() + limit_s
    with TemporaryFile() as request, TemporaryFile() as output:
        pickle.dump((script, job, settings), request)
        request.seek(0)
        try:
            process = _started(request, output)
        except (OSError, subprocess.SubprocessError) as error:  # the machine may have no memory for it
            _LOG.info(_UNKNOWN, error)
            yield lambda: None
            return
        try:
            yield lambda: _result(process, output, deadline)
        finally:
            end_group(process, 0.0)


def _started(request: IO[bytes], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "undula.driver.count_process"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONBREAKPOINT": "0"},
        stdin=request,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C must not reach it, and its own processes end with it
        preexec_fn=before_exec,
    )


def _result(process: "subprocess.Popen[bytes]", output: IO[bytes], deadline: float) -> Count | None:
    while (is_late := is_alive(process)) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    end_group(process, 0.0)
    output.seek(0)
    text = output.read().decode(errors="replace")
    counted: Count | None = None if is_late else received(text)
    if is_late:
        _LOG.warning(
            "the memory of a step is not checked, because the script takes more than %.0f s up to its first step; set "
            "workers.check_memory=false, so that the start does not wait for it",
            LIMIT_S,
        )
    elif counted is None:
        # The script may need values or a GPU, which the process does not have, or it has a part that is not modelled.
        _LOG.info(_UNKNOWN, (text.strip().splitlines() or ["no output"])[-1])
    return counted


def send(result: object) -> None:
    """Print the result of this process for the one that has started it."""
    print(f"\n{MARK}{base64.b64encode(pickle.dumps(result)).decode()}", file=sys.__stdout__, flush=True)


def received(output: str) -> Any:
    """Return the result in the output of a process; None if it has none."""
    line = next((line for line in reversed(output.splitlines()) if line.startswith(MARK)), None)
    return None if line is None else pickle.loads(base64.b64decode(line.removeprefix(MARK)))


def _main() -> None:
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the working directory, which Python puts there because of -m
    from undula.train.dry_run.count import count

    script, job, settings = pickle.load(sys.stdin.buffer)
    script.make_ready(keeps=True)
    send(count(script, job, settings, may_be_real=False))
    os._exit(0)  # without what the script does when a process ends


if __name__ == "__main__":
    _main()
