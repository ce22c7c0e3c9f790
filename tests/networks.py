"""Machines with networks of their own, which are namespaces of this one: each has its name, its `/etc/hosts` and two interfaces.

The machines reach each other over DATA only. The default route of each leads over OTHER, to a network of which no other machine knows.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from waiting import wait_until

from undula.state.processes import end_group

DATA, OTHER, BRIDGE = "data0", "other0", "undula-br"
GCS = 26379
NAMES = ("undula-m1", "undula-m2")


def address_of(number: int) -> str:
    """Return the address of a machine on the network that the machines share."""
    return f"10.78.0.{number}"


@contextmanager
def machines() -> Iterator[None]:
    """Make two machines for the time of a block.

    Raises:
        OSError, subprocess.SubprocessError: This process may not make network namespaces.
    """
    with ExitStack() as stack:
        _ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(_ip, "link", "del", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(NAMES, 1):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", f"undula-v{number}", "type", "veth", "peer", "name", DATA, "netns", name)
            stack.callback(
                _ip, "link", "del", f"undula-v{number}"
            )  # a process that is still there would keep the namespace
            _ip("link", "set", f"undula-v{number}", "master", BRIDGE, "up")
            _ip("-n", name, "link", "add", OTHER, "type", "veth", "peer", "name", "far0")
            for device, address in ((DATA, address_of(number)), (OTHER, f"10.79.{number}.1")):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            for device in ("lo", DATA, OTHER, "far0"):
                _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "route", "add", "default", "dev", OTHER)
        yield


def can_make_machines() -> bool:
    """Return whether this process may make network namespaces."""
    try:
        with machines():
            return True
    except (OSError, subprocess.SubprocessError):
        return False


class Machines:
    """Ray nodes on machines, and processes there.

    Args:
        folder: Folder for the files of the nodes, whose path must be short.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        (folder / "token").write_text(secrets.token_hex(32))
        self.env: Mapping[str, str] = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "RAY_worker_niceness": "0",
        }
        self.address = f"{address_of(1)}:{GCS}"

    def start(
        self, number: int, *command: str, env: Mapping[str, str] | None = None, log: IO[str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start a command on a machine, whose name resolves to the loopback there, as it does by default on Debian."""
        name = NAMES[number - 1]
        hosts = self._folder / f"hosts-{number}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        enter = f'hostname {name} && mount --bind {hosts} /etc/hosts && exec "$@"'
        return subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", enter, "sh", *command],
            env={**os.environ, **self.env, **(env or {})}, stdout=log or subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True, text=True,
        )  # fmt: skip

    @contextmanager
    def node(self, number: int, num_cpus: int = 1, env: Mapping[str, str] | None = None) -> Iterator[None]:
        """Run a Ray node on a machine during a block, the head on the first one."""
        is_head = number == 1
        head = [
            "--head",
            f"--port={GCS}",
            "--no-monitor",
            "--include-dashboard=false",
            "--ray-client-server-port=26400",
        ]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            *(head if is_head else [f"--address={self.address}"]),
            *(
                f"--node-ip-address={address_of(number)}",
                f"--num-cpus={num_cpus}",
                f"--temp-dir={self._folder / str(number)}",
            ),
            *("--object-store-memory=100000000", "--include-log-monitor=False", "--dashboard-agent-listen-port=0"),
        ]
        path = self._folder / f"node-{number}.log"
        with path.open("w") as log:
            process = self.start(number, *command, env=env, log=log)
        try:
            wait_until(lambda: "Ray runtime started" in path.read_text(), 60, process, path.read_text)
            yield
        finally:
            end_group(process, 3.0)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
