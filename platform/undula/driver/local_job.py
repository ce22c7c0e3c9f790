"""Run of a script on a new local cluster of its own, which ends with it.

The script starts while the cluster does: it imports its libraries and checks the job before it connects. Ray's job API, which would start
it only afterwards, is not used.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from undula.cluster.forking.interpreter import DRIVER_SOCKET, MODULES, is_possible, socket_of, write_interpreter
from undula.cluster.local import (
    STARTS,
    LocalCluster,
    await_start,
    before_exec,
    short_folder,
    starting_cluster,
)
from undula.driver.project import importable
from undula.elastic.ray.private_environment import names_of
from undula.state.processes import end_group

FORKED = ("undula.entry", "undula.elastic.ray.controller", "ray.tune")
"""Modules that the script's driver and the workers import, besides torch and Ray."""
READ_EARLY = (
    "ARROW_",
    "GOMP_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "RAY_",
    "TORCH",
)
"""Beginnings of the names of environment variables that Python, torch, Ray and their libraries read when they are started or imported."""
STOP_TIMEOUT_S = 5.0
"""Maximum time in seconds to wait until a script that is stopped has ended."""


def run_on_own_cluster(
    script: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    early: Mapping[str, str],
    modules: Sequence[Path],
    num_cpus: int,
    show: Callable[[str], None],
) -> int:
    """Run a script on a new local cluster, and return its exit status.

    Args:
        script: Path of the script.
        arguments: Its arguments.
        variables: Environment variables of the script and its workers, which no log or file shows.
        early: Those of these variables with which each process of the cluster starts.
        modules: Packages and modules that the script needs beside its folder.
        num_cpus: Number of CPUs of the cluster.
        show: Callback for each line that the script prints.

    Raises:
        ClusterError: The cluster did not start.
        KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM ended this command. The script was stopped.
    """
    with (
        importable(modules, early) as path,
        _forking_python(variables) as python,
        starting_cluster(num_cpus, {**early, **path, MODULES: ",".join(FORKED)}, python, accepts_jobs=False) as cluster,
        _started(script, arguments, cluster, {**variables, **path, **names_of(variables)}) as process,
    ):
        await_start(cluster, lambda: process.poll() is not None or cluster.raylet_socket.exists())
        assert process.stdout is not None
        try:
            for line in process.stdout:
                show(line.decode(errors="backslashreplace").rstrip("\n"))
        except (KeyboardInterrupt, SystemExit):
            show("stopping ...")
            raise
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _forking_python(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the path of an interpreter whose workers are forks; that of this one if that cannot be, or if libraries read one of the
    job's variables when they are imported, which they are before the fork."""
    if not is_possible() or any(name.startswith(READ_EARLY) for name in variables):
        yield sys.executable
        return
    folder = short_folder("undula-fork-")
    try:
        yield _working_interpreter(folder) or sys.executable
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _working_interpreter(folder: Path) -> str | None:
    """Write the interpreter whose workers are forks into an empty folder, and return its path; None if it cannot run there.

    That is so if this Python is in no virtual environment, if its path is too long for a script's first line or has a space, or if the
    folder is on a file system from which nothing may be executed.
    """
    try:
        python = write_interpreter(folder)
        subprocess.run([python, "-c", ""], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    return python


@contextmanager
def _started(
    script: Path, arguments: Sequence[str], cluster: LocalCluster, env: Mapping[str, str]
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start a script, which ends with the block at the latest."""
    own = {"RAY_ADDRESS": cluster.address, STARTS: str(cluster.raylet_socket), "PYTHONHASHSEED": "0"}
    if cluster.python != sys.executable:
        listens = socket_of(cluster.python, cluster.process.pid)
        await_start(cluster, listens.exists)
        own[DRIVER_SOCKET] = str(listens)
    process = subprocess.Popen(
        [cluster.python, "-u", "-m", "undula.driver", str(script), *arguments],
        env={**os.environ, **cluster.env, **env, **own},
        cwd=script.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C must not reach it twice
        preexec_fn=before_exec,
    )
    try:
        yield process
    finally:
        end_group(process, STOP_TIMEOUT_S)
