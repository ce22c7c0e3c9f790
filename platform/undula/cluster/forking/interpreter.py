"""Interpreter that runs workers in forks. It imports little, because it is started twice for each worker."""

import array
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
"""Folder of this package, which is imported from there by a name of its own: workers import the Undula that their job has."""
SOCKET = "UNDULA_FORK_SERVER"
"""Environment variable with the path of the socket on which the node's fork server listens."""
JOB_ID = "RAY_JOB_ID"
JOB_ID_BYTES = 8
"""Length of a job's id in hexadecimal digits."""
MODULES = "UNDULA_FORK_MODULES"
"""Environment variable of a node for a single job with the names of modules that the server of this job imports before it is asked."""
DRIVERS = "-drivers"
"""Takes the place of a job's id in requests for drivers, which have none before they connect to Ray."""
DRIVER_SOCKET = "UNDULA_FORK_DRIVER"
"""Environment variable with the path of this socket on the head. It lets a process run its program in a fork, as a driver."""
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for the driver of a submitted job."""
WORKER_SCRIPTS = ("/ray/_private/workers/setup_worker.py", "/ray/_private/workers/default_worker.py")
AGENT_SCRIPT = "/ray/_private/runtime_env/agent/main.py"


def write_interpreter(folder: Path, python: str = sys.executable) -> str:
    """Write a virtual environment with this interpreter into an empty folder, and return the interpreter's path.

    Args:
        folder: Folder of the new virtual environment.
        python: Path of the interpreter of a virtual environment, whose packages the new one has.
    """
    borrowed = Path(python).parents[1]
    (folder / "pyvenv.cfg").write_text((borrowed / "pyvenv.cfg").read_text())
    (folder / "lib").symlink_to(borrowed / "lib")
    (folder / "bin").mkdir()
    path = folder / "bin" / "python"
    path.write_text(
        f"#!{python} -IS\n"
        f"import sys; sys.path.append({ROOT!r})\n"
        "from forking.interpreter import interpret; interpret(*sys.argv)\n"
    )
    path.chmod(0o700)
    return str(path)


def is_possible() -> bool:
    """Return whether this system can fork workers, and lists the children of a process."""
    return hasattr(os, "pidfd_open") and Path("/proc/self/task", str(os.getpid()), "children").exists()


def socket_of(interpreter: str, server: int) -> Path:
    """Return the path of a node's socket, given the interpreter that has started the node and the id of its process."""
    return Path(interpreter).parent / str(server)


def interpret(path: str, *arguments: str) -> None:
    """Do what `python arguments...` does.

    Args:
        path: Path of this interpreter.
        arguments: Its arguments.
    """
    script = next((each for each in arguments if not each.startswith("-")), "")
    if arguments[:3] == ("-m", "ray.scripts.scripts", "start"):
        code = f"import sys; sys.path.append({ROOT!r}); from forking.server import serve; sys.path.pop(); serve(*sys.argv[1:])"
        os.execv(sys.executable, [sys.executable, "-c", code, path, *arguments[1:]])
    if script.endswith(WORKER_SCRIPTS) and {SOCKET, JOB_ID} <= os.environ.keys():
        _exit_as(_run_in_fork(os.environ[SOCKET], os.environ[JOB_ID], arguments[arguments.index(script) :]))
    of_head = os.environ.pop(DRIVER_SOCKET, os.environ.get(SOCKET) if JOB_CONFIG in os.environ else None)
    program = arguments[1:] if arguments[:1] == ("-u",) else arguments
    if of_head and program and program[0] in ("-c", "-m", script):
        _exit_as(_run_in_fork(of_head, DRIVERS, program))
    # Workers are started with the interpreter that the agent runs with.
    os.execv(sys.executable, [path if script.endswith(AGENT_SCRIPT) else sys.executable, *arguments])


def _exit_as(status: int | None) -> None:
    """End this process with the exit status of a fork, if there was one."""
    if status is not None:
        sys.exit(status)


def _run_in_fork(path: str, job: str, arguments: tuple[str, ...]) -> int | None:
    """Do what `python arguments...` does in a fork of a job's server, and return its exit status; None if the server does not fork.

    Signals are passed on to the server, which has the fork for a child. This process could only send them to a number.
    """
    request = json.dumps([arguments, str(Path.cwd()), dict(os.environ)]).encode()
    has_begun, answer = b"", b""
    with socket.socket(socket.AF_UNIX) as server:

        def pass_on(number: int, frame: object) -> None:
            with suppress(OSError):  # the server may have ended
                server.send(bytes([number]))

        with suppress(ConnectionError, FileNotFoundError):  # the server may have ended, or refused the request
            server.connect(path)
            server.sendall(job.encode())
            streams = array.array("i", [0, 1, 2]).tobytes()
            server.sendmsg([len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
            server.sendall(request)
            if has_begun := server.recv(1):
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, pass_on)
                answer = server.recv(1)
    if not has_begun:
        return None
    return answer[0] if answer else 128 + signal.SIGKILL
