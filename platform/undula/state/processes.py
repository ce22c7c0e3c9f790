"""Processes of this machine: identities that stay unique although process ids are reused, and the only functions that send signals by id.

The system gives the id of a process that has ended, and was waited for, to a new process, within minutes on a busy machine. Processes of
two containers can have the same id, too. A signal to a bare number may therefore reach another process than the one that was meant.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psutil

POLL_INTERVAL_S = 0.02

Handle: TypeAlias = "psutil.Process | subprocess.Popen[Any]"
"""Process, or child of this process. Both know whether their id still belongs to them: psutil compares start times, and the id of a child
is not reused before the child has been waited for."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process, which no other process has, whether earlier, later or in another container."""

    namespace: str
    """Identifier of the machine's last boot and of the process namespace, in which `pid` is valid; empty if unknown."""
    pid: int
    started: int
    """Start of the process in clock ticks after the boot."""

    @property
    def is_visible(self) -> bool:
        """Whether the process belongs to the namespace of this process. Other processes cannot be found, and no signal reaches them."""
        return bool(self.namespace) and self.namespace == _namespace()


def identity_of(process: Handle) -> ProcessIdentity:
    """Return the identity of a process.

    Raises:
        psutil.NoSuchProcess: The process has ended, and its parent has waited for it.
    """
    alive, namespace = _checked(process), _namespace()
    try:
        return ProcessIdentity(namespace, alive.pid, _started(alive.pid) if namespace else 0)
    except OSError:
        raise psutil.NoSuchProcess(alive.pid) from None


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    return identity_of(psutil.Process())


def find_process(identity: ProcessIdentity) -> psutil.Process | None:
    """Return the process with an identity; None if it has ended or belongs to another namespace."""
    if not identity.is_visible:
        return None
    with suppress(psutil.Error, OSError):
        process = psutil.Process(identity.pid)
        if _started(process.pid) == identity.started:
            return process
    return None


def is_known_to_have_ended(identity: ProcessIdentity) -> bool:
    """Return whether a process has ended. False if that is unknown, as for a process of another namespace."""
    if not identity.is_visible:
        return False
    try:
        os.kill(identity.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # a process of another user, or an invalid process id
        return False
    try:
        return _started(identity.pid) != identity.started
    except OSError:  # another user's processes may be hidden
        return False


def is_alive(process: Handle) -> bool:
    """Return whether a process has not ended. A child that has ended is not waited for, so that its id remains its own."""
    try:
        alive = _checked(process)
        return bool(alive.is_running() and alive.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def descendants(process: Handle) -> list[psutil.Process]:
    """Return all descendants of a process; none if the process has ended."""
    try:
        return list(_checked(process).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def send_signal(process: Handle, number: int) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(psutil.NoSuchProcess):
        _checked(process).send_signal(number)


def kill_tree(process: Handle) -> None:
    """Send SIGKILL to a process and all its descendants."""
    for member in [process, *descendants(process)]:
        send_signal(member, signal.SIGKILL)


def signal_group(leader: Handle, number: int) -> None:
    """Send a signal to all processes of a group.

    Args:
        leader: Leader of the group. Nothing is sent if it has ended and was waited for, because its id may then be that of another group.
        number: Number of the signal.
    """
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        alive = _checked(leader)
        if alive.is_running():
            os.killpg(alive.pid, number)


def end_group(leader: "subprocess.Popen[Any]", patience_s: float) -> None:
    """End a group whose leader is a child: the leader gets SIGTERM and `patience_s` seconds, and what remains of the group gets SIGKILL."""
    send_signal(leader, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    try:
        while is_alive(leader) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
    finally:
        signal_group(leader, signal.SIGKILL)
        leader.wait()


def _checked(process: Handle) -> psutil.Process:
    """Return psutil's handle of a process.

    Raises:
        psutil.NoSuchProcess: The process is a child that was waited for.
    """
    if not isinstance(process, subprocess.Popen):
        return process
    if process.returncode is not None:
        raise psutil.NoSuchProcess(process.pid)
    return psutil.Process(process.pid)


def _namespace() -> str:
    """Return the identifier of this machine's last boot and of the process namespace; empty if the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> int:
    """Return the start of a process in clock ticks after the boot. psutil's time of day would change with the machine's clock.

    Raises:
        OSError: There is no such process, or the system does not tell.
    """
    # The process's name, in parentheses, can contain spaces and parentheses itself.
    _, _, after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
    return int(after_name.split()[19])
