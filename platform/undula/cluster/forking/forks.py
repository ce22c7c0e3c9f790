"""Process that forks, and its children."""

import os
import select
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from .programs import call_and_end


class Fork:
    """Child of a fork server. A descriptor refers to it, because its process id may be that of another process once it has ended."""

    def __init__(self, pid: int):
        self.pid = pid
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
            call_and_end(function)
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
