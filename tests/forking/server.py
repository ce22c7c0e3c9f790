"""Fork servers of nodes and jobs."""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from forking.interpreter import JOB_ID_BYTES, SOCKET

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
"""Modules that a node's server imports: those that workers import, or that torch imports in their first step."""
RAY = ("ray._private.workers.default_worker", "ray._private.workers.setup_worker", "ray.util.state")
"""Modules that a job's server imports."""
WITH_ACTORS = ("ray.data", "ray.train")
"""Those that define actors, and draw a random id for each, after which all forks would draw the same ids. They get ids of another kind."""
ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
}
"""Environment variables with which these modules start no threads, because threads do not exist in a fork. torch reads the number of
OpenMP threads when it is imported. Ray sets it to 1, too, for a worker with one CPU, but only after the fork."""
REQUEST_LIMIT_S = 10.0
"""Maximum time in seconds for the next part of a client's request. A client that was stopped would otherwise block the whole server."""
MAX_JOBS = 3
"""Maximum number of jobs whose server waits for requests."""


def serve(interpreter: str, module: str, *arguments: str) -> NoReturn:
    """Run `python -m module arguments...`, which starts a node, and serve until it has ended.

    Args:
        interpreter: Path of the interpreter that asks for forks.
        module: Name of the module.
        arguments: Arguments of the module.
    """
    path = Path(interpreter).parent / str(os.getpid())
    listener = socket.socket(socket.AF_UNIX)
    starting = path.with_name(f"{path.name}-")
    listener.bind(str(starting))
    listener.listen(64)
    starting.rename(path)  # whoever finds the path can connect
    os.environ[SOCKET] = str(path)
    status = NodeServer(listener, interpreter).run([module, *arguments])
    path.unlink()
    sys.exit(status)


class Fork:
    """Child of a fork server. A descriptor refers to it, because its process id may be that of another process once it has ended."""

    def __init__(self, pid: int):
        self._descriptor = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        """Send a signal to the child, unless it has ended."""
        if self._descriptor >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        """Close the descriptor. Nothing is sent to the child any more."""
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


class ForkServer(ABC):
    """Process that forks."""

    def __init__(self, requests: socket.socket):
        self._requests: socket.socket | None = requests
        self._signals, self._signal_sender = socket.socketpair()
        self._signal_sender.setblocking(False)
        self._forks: dict[int, Fork] = {}
        """Children that have not been waited for, by process id."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # makes the signal wake up `select`
        signal.set_wakeup_fd(self._signal_sender.fileno())

    @abstractmethod
    def sockets(self) -> list[socket.socket]:
        """Return sockets to peers."""

    @abstractmethod
    def accept(self, requests: socket.socket) -> None:
        """Accept a request."""

    @abstractmethod
    def peer_ready(self, peer: socket.socket) -> None:
        """Handle a message from a peer, or its end."""

    @abstractmethod
    def child_ended(self, fork: Fork, status: int) -> None:
        """Handle the end of a child."""

    def fork(self, function: Callable[[], object]) -> Fork:
        """Call `function` in a fork, which then ends, and return the fork."""
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            inherited = (self._requests, self._signals, self._signal_sender, *self.sockets(), *self._forks.values())
            for each in inherited:
                if each is not None:
                    each.close()
            _call_and_end(function)
        fork = self._forks[pid] = Fork(pid)
        return fork

    def serve_once(self) -> None:
        """Wait until something happens, and handle it."""
        requests = [] if self._requests is None else [self._requests]
        for ready in select.select([self._signals, *requests, *self.sockets()], [], [])[0]:
            if ready is self._requests:
                self.accept(ready)
            elif ready is not self._signals:
                self.peer_ready(ready)
            else:
                self._signals.recv(4096)
                with suppress(ChildProcessError):
                    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                        status = os.waitstatus_to_exitcode(ended[1])
                        if fork := self._forks.pop(ended[0], None):
                            fork.close()
                            self.child_ended(fork, status if status >= 0 else 128 - status)


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
        _import_all(LIBRARIES, dict(os.environ))  # while the node starts
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
            self._jobs[job] = self._jobs.pop(job, None) or self._start_job(client)
            socket.send_fds(self._jobs[job], [b"1"], [client.fileno()])
        while len(self._jobs) > MAX_JOBS:
            self._jobs.pop(next(iter(self._jobs))).close()

    def _start_job(self, client: socket.socket) -> socket.socket:
        """Start the server of a job, and return a connection to it. The server must not keep open what it has not been sent yet."""
        ours, theirs = socket.socketpair()

        def run() -> None:
            ours.close()
            client.close()
            JobServer(theirs, self._interpreter).run()

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
        own = {"", *_paths_in_environment()}
        self._library_paths = [each for each in sys.path if each not in own]
        self._has_ray = False

    def run(self) -> None:
        """Serve until there are no more requests and all forks have ended."""
        while self._requests is not None or self._clients:
            self.serve_once()

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
        if not self._has_ray:
            _import_all(RAY, environment)
            with _ids_from_the_system():
                _import_all(WITH_ACTORS, environment)
            self._has_ray = True

        def run() -> None:
            client.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.executable = self._interpreter
            sys.path[:] = [*_paths_in_environment(), *self._library_paths]
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)
            _run_program(arguments)

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


def _import_all(names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Import modules with an environment, which this process keeps."""
    os.environ.clear()
    os.environ.update({**environment, **ONE_THREAD})
    for name in names:
        importlib.import_module(name)
    for name in ONE_THREAD:
        os.environ.pop(name)
    gc.freeze()  # otherwise, the first collection in a fork would copy the pages of all objects
    assert len(list(Path("/proc/self/task").iterdir())) == 1


@contextmanager
def _ids_from_the_system() -> Iterator[None]:
    """Let the system draw the ids of classes of actors, which does not change what Ray will draw."""
    actor: Any = importlib.import_module("ray.actor")
    kind = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: kind(os.urandom(kind.size())))
    yield
    actor.ActorClassID = kind


def _run_program(arguments: list[str]) -> None:
    """Do what `python arguments...` does."""
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(rest[0], vars(main))
    else:
        script = Path(first).absolute()
        sys.argv = arguments
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")


def _paths_in_environment() -> list[str]:
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def _call_and_end(function: Callable[[], object]) -> NoReturn:
    """Call a function and end the process as the interpreter does at the end of a script."""
    status = 0
    try:
        function()
    except SystemExit as end:
        if isinstance(end.code, int | None):
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    for end in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with suppress(BaseException):
            end()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(status)
