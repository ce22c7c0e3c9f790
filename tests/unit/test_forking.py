"""Tests of the interpreter of test clusters: which processes its signals reach."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TESTS = Path(__file__).parents[1]
CLIENT = f"""
import signal, sys
sys.path.append({str(TESTS)!r})
from forking import interpreter

class Socket(interpreter.socket.socket):
    def recv(self, *arguments):
        received = super().recv(*arguments)
        if received == b"":  # the server has ended, and a signal arrives now
            signal.raise_signal(signal.SIGTERM)
        return received

interpreter.socket.socket = Socket
signal.signal(signal.SIGTERM, lambda *_: None)
sys.exit(interpreter._run_in_fork(sys.argv[1], "01000000", ("-c", "pass")))
"""
GROUP = """
import subprocess, sys
member = subprocess.Popen(["sleep", "60"])
status = subprocess.call([sys.executable, "-c", *sys.argv[1:]])
print(status, member.poll(), flush=True)
member.kill()
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
    assert out.split() == [str(128 + signal.SIGKILL), "None"]


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
