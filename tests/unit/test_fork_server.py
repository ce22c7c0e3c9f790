"""Tests of the interpreter whose workers are forks, and of its fork servers, with a node that does nothing."""

import array
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

CLUSTER = Path(__file__).parents[2] / "platform" / "undula" / "cluster"
CLIENT = f"""
import signal, sys
sys.path.append({str(CLUSTER)!r})
from forking import interpreter

class Socket(interpreter.socket.socket):
    def recv(self, *arguments):
        received = super().recv(*arguments)
        if received == b"":  # the server has ended, and a signal arrives now
            signal.raise_signal(signal.SIGTERM)
        return received

interpreter.socket.socket = Socket
signal.signal(signal.SIGTERM, lambda *_: None)
interpreter._exit_as(interpreter._run_in_fork(sys.argv[1], "01000000", ("-c", "pass")))
sys.exit(5)
"""
GROUP = """
import subprocess, sys
member = subprocess.Popen(["sleep", "60"])
status = subprocess.call([sys.executable, "-c", *sys.argv[1:]])
print(status, member.poll(), flush=True)
member.kill()
"""
PROGRAM = f"""
import sys
sys.path.append({str(CLUSTER)!r})
from forking import interpreter
sys.exit(interpreter._run_in_fork(sys.argv[1], "01000000", ("-c", sys.argv[2])))
"""
SERVER = f"""
import sys
sys.path.append({str(CLUSTER)!r})
from forking import server
server.LIBRARIES = server.RAY = ()
server.REQUEST_LIMIT_S = 1.0
server.serve(sys.argv[1], "node")
"""
NODE = "import sys; sys.stdin.read()"
ENDS_WITH_7 = "import sys; sys.exit(7)"
JOB = b"01000000"
OPEN_TWICE = """
import os
streams = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
others = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd") if int(number) > 2]
print([other for other in others if os.path.islink(other) and os.readlink(other) in streams])
"""
FAILS_TO_SHUT_DOWN = """
import threading
threading._register_atexit(lambda: 1 / 0)
print("written", end="")
"""


def accept(listener: socket.socket) -> socket.socket:
    """Accept the request of a client, as a fork server does."""
    client, _ = listener.accept()
    client.recv(8, socket.MSG_WAITALL)
    head, streams, _, _ = socket.recv_fds(client, 4, 3)
    assert len(streams) == 3
    for stream in streams:
        os.close(stream)
    client.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
    return client


@contextmanager
def killed(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Kill a process at the end of the block, so that a failure does not wait for it."""
    try:
        yield
    finally:
        process.kill()


def test_a_signal_reaches_no_other_process_if_the_fork_server_has_ended(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "server"))
        listener.listen()
        command = [sys.executable, "-c", GROUP, CLIENT, str(tmp_path / "server")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as group:
            accept(listener).close()
            out, _ = group.communicate(timeout=30)
    assert out.split() == ["5", "None"]


def test_signals_are_passed_on_through_the_fork_server(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "server"))
        listener.listen()
        with subprocess.Popen([sys.executable, "-c", CLIENT, str(tmp_path / "server")]) as process, killed(process):
            client = accept(listener)
            client.send(b"1")
            client.settimeout(0.05)
            passed_on, deadline = b"", time.monotonic() + 30
            while not passed_on:
                assert process.poll() is None
                assert time.monotonic() < deadline
                process.send_signal(signal.SIGTERM)  # it is ignored until the client knows that the fork has begun
                with suppress(TimeoutError):
                    passed_on = client.recv(1)
            assert passed_on == bytes([signal.SIGTERM])
            client.send(bytes([7]))
            assert process.wait(30) == 7


def test_a_program_whose_fork_is_killed_with_its_server_ends_as_if_it_were_killed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "server"))
        listener.listen()
        with subprocess.Popen([sys.executable, "-c", CLIENT, str(tmp_path / "server")]) as process, killed(process):
            client = accept(listener)
            client.send(b"1")
            client.close()
            assert process.wait(30) == 128 + signal.SIGKILL


def test_a_program_runs_without_a_fork_if_there_is_no_server(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CLIENT, str(tmp_path / "server")]) as process, killed(process):
        assert process.wait(30) == 5


def test_a_program_whose_request_is_refused_runs_without_a_fork(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "server"))
        listener.listen()
        with subprocess.Popen([sys.executable, "-c", CLIENT, str(tmp_path / "server")]) as process, killed(process):
            listener.accept()[0].close()
            assert process.wait(30) == 5


@pytest.fixture
def server(tmp_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Fork server of a node, which ends when its input does."""
    (tmp_path / "node.py").write_text(NODE)
    command = [sys.executable, "-c", SERVER, str(tmp_path / "python")]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path, env=env) as process, killed(process):
        deadline = time.monotonic() + 30
        while not (tmp_path / str(process.pid)).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)  # limits the polling rate
        yield process
        process.communicate(timeout=30)


def connected(server: "subprocess.Popen[bytes]", folder: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(30)
    client.connect(str(folder / str(server.pid)))
    return client


def send_streams(client: socket.socket, stream: int = 0) -> None:
    """Send the part of a request that precedes its body, with one stream for all three."""
    streams = array.array("i", [stream] * 3).tobytes()
    client.sendmsg([(100).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])


def run_in_fork(server: "subprocess.Popen[bytes]", folder: Path, program: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PROGRAM, str(folder / str(server.pid)), program]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def server_of_job(server: "subprocess.Popen[bytes]") -> psutil.Process:
    _, found = psutil.Process(server.pid).children()
    return found


def test_a_node_whose_libraries_start_threads_refuses_to_fork(tmp_path: Path) -> None:
    library = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    (tmp_path / "threading_library.py").write_text(library)
    (tmp_path / "node.py").write_text(NODE)
    code = SERVER.replace(
        "server.LIBRARIES = server.RAY = ()", "server.LIBRARIES, server.RAY = ('threading_library',), ()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "python")]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=env) as process,
        killed(process),
    ):
        assert process.stderr is not None
        while b"the import has started threads" not in process.stderr.readline():
            assert process.poll() is None
        client = [sys.executable, "-c", CLIENT, str(tmp_path / str(process.pid))]
        assert subprocess.run(client, timeout=30).returncode == 5


@pytest.mark.parametrize("sent", ["nothing", "the job", "the streams"])
def test_a_stopped_client_does_not_hold_up_the_others(
    server: "subprocess.Popen[bytes]", tmp_path: Path, sent: str
) -> None:
    with connected(server, tmp_path) as stopped:
        if sent != "nothing":
            stopped.sendall(JOB)
        if sent == "the streams":
            send_streams(stopped)
        assert run_in_fork(server, tmp_path, ENDS_WITH_7).returncode == 7
        with suppress(ConnectionResetError):
            assert stopped.recv(1) == b""


def test_a_node_outlives_the_server_of_a_job(server: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    assert run_in_fork(server, tmp_path, ENDS_WITH_7).returncode == 7
    server.send_signal(signal.SIGSTOP)  # the end of the job's server and the next request arrive at the same time
    server_of_job(server).kill()
    with connected(server, tmp_path) as client:
        client.sendall(JOB)
        server.send_signal(signal.SIGCONT)
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert run_in_fork(server, tmp_path, ENDS_WITH_7).returncode == 7


def test_a_killed_client_leaves_no_open_streams(server: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("w") as stream, connected(server, tmp_path) as client:
        client.sendall(JOB)
        send_streams(client, stream.fileno())
    assert run_in_fork(server, tmp_path, ENDS_WITH_7).returncode == 7
    assert str(output) not in {opened.path for opened in server_of_job(server).open_files()}


def test_a_fork_has_its_streams_open_once(server: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    assert run_in_fork(server, tmp_path, OPEN_TWICE).stdout == "[]\n"


@pytest.mark.parametrize(
    ("program", "status", "out", "err"),
    [
        ("import sys; sys.exit('some text')", 1, "", "some text\n"),
        ("import sys; sys.exit('')", 1, "", "\n"),
        ("import sys; sys.exit()", 0, "", ""),
        (FAILS_TO_SHUT_DOWN, 0, "written", ""),
    ],
)
def test_a_fork_ends_as_the_interpreter_does(
    server: "subprocess.Popen[bytes]", tmp_path: Path, program: str, status: int, out: str, err: str
) -> None:
    done = run_in_fork(server, tmp_path, program)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)
