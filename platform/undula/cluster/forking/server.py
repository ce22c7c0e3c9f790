"""Fork servers of nodes and jobs."""

import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from .forks import Fork, ForkServer
from .interpreter import DRIVERS, JOB_ID, JOB_ID_BYTES, MODULES, SOCKET, socket_of
from .programs import ids_from_the_system, import_all, paths_in_environment, run_program, use_threads

LIBRARIES = (
    *("torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.utils.tensorboard"),
    *(
        "pandas",
        "pyarrow.parquet",
        "pyarrow.dataset",
        "boto3",
        "pydantic",
        "fsspec",
        "safetensors.torch",
        "horovod.torch",
    ),
)
"""Modules that a node's server imports if they are installed: those that workers import, or that torch imports in their first step."""
RAY = ("ray._private.workers.default_worker", "ray._private.workers.setup_worker", "ray.util.state")
"""Modules that a job's server imports."""
WITH_ACTORS = ("ray.data", "ray.train")
"""Modules that a job's server imports in addition. They define actors, for each of which Ray draws a random id. Forks of a process that has
drawn some would all draw the same ones from then on, so these ids come from the system."""
REQUEST_LIMIT_S = 10.0
"""Maximum time in seconds for the next part of a client's request. A client that was stopped would otherwise block the whole server."""
RAYLET = "RAY_RAYLET_PID"
"""Environment variable of a worker with the process id of its raylet. Ray reads it when it is imported."""
RAYLET_LIMIT_S = 60.0
"""Maximum time in seconds until a node has started its raylet."""
FIRST_JOB = "01000000"
"""Id of the first job of a cluster."""
MAX_JOBS = 3
"""Maximum number of jobs whose server waits for requests."""


def serve(interpreter: str, module: str, *arguments: str) -> NoReturn:
    """Run `python -m module arguments...`, which starts a node, and serve until it has ended.

    Args:
        interpreter: Path of the interpreter that asks for forks.
        module: Name of the module.
        arguments: Arguments of the module.
    """
    path = socket_of(interpreter, os.getpid())
    listener = socket.socket(socket.AF_UNIX)
    starting = path.with_name(f"{path.name}-")
    listener.bind(str(starting))
    listener.listen(64)
    starting.rename(path)  # whoever finds the path can connect
    os.environ[SOCKET] = str(path)
    status = NodeServer(listener, interpreter).run([module, *arguments])
    path.unlink(missing_ok=True)
    sys.exit(status)


class NodeServer(ForkServer):
    """Server of a node. It starts the node, and a server for each job."""

    def __init__(self, listener: socket.socket, interpreter: str):
        super().__init__(listener)
        self._interpreter = interpreter
        self._jobs: dict[bytes, socket.socket] = {}
        """Connections to the servers of jobs, by the job's id, the most recently used last."""
        self._status: int | None = None

    def run(self, command: list[str]) -> int:
        """Start the node, serve until it has ended, and return its exit status. SIGTERM is passed on to it."""
        node = self.fork(lambda: self._start_node(command))
        signal.signal(signal.SIGTERM, lambda number, frame: node.send(number))
        self._node = node
        try:
            import_all(LIBRARIES, dict(os.environ))  # while the node starts
        except Exception:
            traceback.print_exc()
            listener, self._requests = self._requests, None
            assert listener is not None
            listener.close()  # programs then run without a fork
        else:
            for job in (DRIVERS, FIRST_JOB) if (modules := os.environ.pop(MODULES, "")) else ():
                self._jobs[job.encode()] = self._start_job(job, modules=modules.split(","))
        while self._status is None:
            self.serve_once()
        return self._status

    def _start_node(self, command: list[str]) -> None:
        sys.executable = self._interpreter
        sys.argv = command
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)

    def sockets(self) -> list[socket.socket]:
        return list(self._jobs.values())

    def accept(self, requests: socket.socket) -> None:
        """Pass a connection on to the server of its job."""
        client, _ = requests.accept()
        client.settimeout(REQUEST_LIMIT_S)
        # The client may have been stopped, and the job's server may have ended, which `peer_ready` handles next.
        with client, suppress(OSError):
            job = client.recv(JOB_ID_BYTES)
            if len(job) < JOB_ID_BYTES:  # the client has been killed
                return
            server = self._jobs.pop(job) if job in self._jobs else self._start_job(job.decode(), client)
            self._jobs[job] = server
            socket.send_fds(server, [b"1"], [client.fileno()])
        while len(self._jobs) > MAX_JOBS:
            self._jobs.pop(next(iter(self._jobs))).close()

    def _start_job(self, job: str, client: socket.socket | None = None, modules: Sequence[str] = ()) -> socket.socket:
        """Start the server of a job, and return a connection to it.

        Args:
            job: Id of the job.
            client: Connection that the server has not been sent yet, and must not keep open.
            modules: Modules to import before the first request.
        """
        ours, theirs = socket.socketpair()

        def run() -> None:
            ours.close()
            if client:
                client.close()
            server = JobServer(theirs, self._interpreter)
            if modules:
                of_worker = {} if job == DRIVERS else {JOB_ID: job, RAYLET: _raylet_of(self._node)}
                server.import_ray({**os.environ, **of_worker}, modules)
            server.run()

        self.fork(run)
        theirs.close()
        return ours

    def peer_ready(self, peer: socket.socket) -> None:
        """Forget a job whose server has ended. These servers send nothing."""
        self._jobs = {job: each for job, each in self._jobs.items() if each is not peer}
        peer.close()

    def child_ended(self, fork: Fork, status: int) -> None:
        if fork is self._node:
            self._status = status


class JobServer(ForkServer):
    """Server of a job. It runs the programs of workers and drivers in forks."""

    def __init__(self, requests: socket.socket, interpreter: str):
        super().__init__(requests)
        self._interpreter = interpreter
        self._clients: dict[Fork, socket.socket] = {}
        """Connections to the interpreters that wait for the end of a fork."""
        own = {"", *paths_in_environment()}
        self._library_paths = [each for each in sys.path if each not in own]
        self._has_ray = False

    def run(self) -> None:
        """Serve until there are no more requests and all forks have ended."""
        while self._requests is not None or self._clients:
            self.serve_once()

    def import_ray(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        """Import Ray, and modules that use it, with the environment of a process of this job."""
        if not self._has_ray:
            import_all(RAY, environment)
            with ids_from_the_system():
                import_all([*WITH_ACTORS, *modules], environment)
            self._has_ray = True

    def sockets(self) -> list[socket.socket]:
        return list(self._clients.values())

    def accept(self, requests: socket.socket) -> None:
        """Run the program that a client asks for."""
        _, connections, _, _ = socket.recv_fds(requests, 1, 1)
        if not connections:
            requests.close()
            self._requests = None
            return
        client = socket.socket(fileno=connections[0])
        client.settimeout(REQUEST_LIMIT_S)
        request = _receive(client)
        if request is None:
            client.close()
            return
        body, streams = request
        arguments, folder, environment = json.loads(body)
        self.import_ray(environment)

        def run() -> None:
            client.close()
            for number, inherited in enumerate(streams):
                os.dup2(inherited, number)
                os.close(inherited)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.executable = self._interpreter
            for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
                del sys.modules[name]  # the program may have a module of this name
            sys.path[:] = [*paths_in_environment(), *self._library_paths]
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            use_threads()
            run_program(arguments)

        fork = self.fork(run)
        self._clients[fork] = client
        with suppress(OSError):  # the client may have been killed
            client.send(b"1")
        for stream in streams:
            os.close(stream)

    def peer_ready(self, peer: socket.socket) -> None:
        """Pass on a signal that a client has received, or kill its fork if the client has ended. To Ray, both are one process."""
        for fork in [fork for fork, each in self._clients.items() if each is peer]:
            number = b""
            with suppress(ConnectionError):
                number = peer.recv(1)
            fork.send(number[0] if number else signal.SIGKILL)
            if not number:
                self._clients.pop(fork).close()

    def child_ended(self, fork: Fork, status: int) -> None:
        if client := self._clients.pop(fork, None):
            with client, suppress(OSError):  # the client may have been killed
                client.send(bytes([status]))


def _raylet_of(node: Fork) -> str:
    """Wait until a node has a raylet, and return its process id."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children")
    deadline = time.monotonic() + RAYLET_LIMIT_S
    while time.monotonic() < deadline:
        with suppress(OSError):  # a child has just ended
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet":
                    return pid
        time.sleep(0.02)
    raise TimeoutError(f"the node has started no raylet within {RAYLET_LIMIT_S:.0f} s")


def _receive(client: socket.socket) -> tuple[bytes, list[int]] | None:
    """Return the body of a client's request and its standard streams; None if the client has been killed or stopped."""
    streams: list[int] = []
    with suppress(OSError):
        head, streams, _, _ = socket.recv_fds(client, 4, 3)
        with client.makefile("rb") as stream:
            length = int.from_bytes(head, "big")
            body = stream.read(length)
        if len(head) == 4 and len(body) == length:
            return body, streams
    for each in streams:
        os.close(each)
    return None
