"""Count of a job's steps in a process of its own, which executes the script as a worker does and cannot disturb the driver."""

import base64
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from undula.cluster.local import before_exec
from undula.state.processes import POLL_INTERVAL_S, end_group, is_alive
from undula.train.dry_run.counting import Count, Setting
from undula.train.job import Job
from undula.train.script_file import ScriptFile

LIMIT_S = 60.0
"""Maximum seconds from the start of the process to its count."""
ORPHAN_S = 2 * LIMIT_S
"""Seconds after which the process ends by itself, if the driver has died and the script ignores the signal about that."""
ASKS_FOR_GPUS = re.compile(
    rb"cuda|gpu|_available|bf16_supported|torch\.accelerator|device\.type|['\"]cpu|save_on_cpu|saved_tensors_hooks|pin_memory",
    re.IGNORECASE,
)
"""Words of which a module has one if it asks what the machine is able to do, or keeps tensors on the host. Its steps may then need less
memory on a GPU than where they are counted."""
_LOG = logging.getLogger("undula")
_UNKNOWN = "the memory of a step is not known in advance: %s"
MARK = "undula count: "
"""Beginning of the line of a process's output that has its result."""
PROGRESS_MARK = "undula counts: "
"""Beginning of a line that says what the process does."""


@contextmanager
def counting(
    script: ScriptFile, job: Job, settings: Sequence[Setting], limit_s: float = LIMIT_S, if_late: str = ""
) -> Iterator[Callable[[], Count | None]]:
    """Count steps of a job in a process that ends with the block at the latest. It sees no GPU, and its output is not shown.

    Args:
        script: Script of the job.
        job: The job.
        settings: Settings of the steps.
        limit_s: Maximum seconds for the count.
        if_late: Warning if it takes longer.

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
            yield lambda: _result(process, output, deadline, if_late)
        finally:
            end_group(process, 0.0)


def _started(request: IO[bytes], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        # Modules of the working directory, which Python would find first, are not those of the driver.
        [
            sys.executable,
            "-c",
            "import sys; sys.path[:] = filter(None, sys.path); import undula.driver.count_process as it; it.main()",
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONBREAKPOINT": "0"},
        stdin=request,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C must not reach it, and its own processes end with it
        preexec_fn=before_exec,
    )


def _result(process: "subprocess.Popen[bytes]", output: IO[bytes], deadline: float, if_late: str) -> Count | None:
    while (is_late := is_alive(process)) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    end_group(process, 0.0)
    output.seek(0)
    text = output.read().decode(errors="replace")
    counted: Count | None = None if is_late else received(text)
    if is_late and if_late:
        _LOG.warning(if_late)
    elif counted is None:
        # The script may need values or a GPU, which the process does not have, or it has a part that is not modelled.
        _LOG.info(_UNKNOWN, (text.strip().splitlines() or ["no output"])[-1])
    return counted


def send(result: object) -> None:
    """Print the result of this process for the one that has started it."""
    print(f"\n{MARK}{base64.b64encode(pickle.dumps(result)).decode()}", file=sys.__stdout__, flush=True)


class Told(logging.Handler):
    """Handler that prints what this process does for the one that has started it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"\n{PROGRESS_MARK}{record.getMessage()}", file=sys.__stdout__, flush=True)


def show_progress(show: Callable[[str], None], line: str) -> None:
    """Show a line of a process's output if it says what the process does."""
    if line.startswith(PROGRESS_MARK):
        show(line.removeprefix(PROGRESS_MARK).rstrip())


def received(output: str) -> Any:
    """Return the result in the output of a process; None if it has none."""
    line = next((line for line in reversed(output.splitlines()) if line.startswith(MARK)), None)
    return None if line is None else pickle.loads(base64.b64decode(line.removeprefix(MARK)))


def main() -> None:
    """Count what the standard input asks for, and send the result."""
    from undula.train.dry_run.count import count

    signal.alarm(int(ORPHAN_S))
    script, job, settings = pickle.load(sys.stdin.buffer)
    before = {*sys.stdlib_module_names, *map(_package, sys.modules)}
    script.make_ready(keeps=True)
    imported = {_package(name) for name in sys.modules} - before
    counted = count(script, job, settings, may_be_real=False)
    send(replace(counted, may_need_less=counted.may_need_less or _asks_for_gpus(script, imported)))
    os._exit(0)  # without what the script does when a process ends


def _package(name: str) -> str:
    return name.partition(".")[0]


def _asks_for_gpus(script: ScriptFile, imported: set[str]) -> bool:
    """Return whether a script, or a module that it has imported, has one of the words of ASKS_FOR_GPUS.

    Args:
        script: The script.
        imported: Packages that the script has imported where it begins. Later, torch and Undula import others for themselves, so that only
            modules outside of the installed packages are the script's.
    """
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    files = {
        file
        for name, module in sys.modules.items()
        if (file := getattr(module, "__file__", None) or "").endswith(".py") and Path(file).is_file()
        if _package(name) in imported or (_package(name) != "undula" and not any(map(file.startswith, installed)))
    }
    return any(map(ASKS_FOR_GPUS.search, (*script.sources.values(), *(Path(file).read_bytes() for file in files))))
