"""Machine of a simulated cloud. It consists of processes on this computer: a Ray node, a metadata server, and a spot watcher that reads it.

`python -m undula.testing.machine FOLDER` reads `machine.json` in the folder. A file `notice` with a number of seconds preempts the machine:
the metadata server announces it, and after that time all processes are killed at once.
"""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from undula.state.processes import POLL_INTERVAL_S, descendants, is_alive, send_signal
from undula.testing.metadata import metadata_server

MACHINE_FILE = "machine.json"
NOTICE = "notice"
DECISION_INTERVAL_S = 0.1
START_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run a machine until it is preempted, its Ray node ends, or it gets SIGTERM."""
    folder = Path(sys.argv[1])
    description: dict[str, Any] = json.loads((folder / MACHINE_FILE).read_text())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with metadata_server() as metadata:
            raylet = _start_ray(description, folder)
            watcher = [sys.executable, "-m", "undula.cli", "spot", "watch", "--source", "aws", "--url", metadata.url]
            _start(
                [*watcher, "--node", description["node"], "--cluster", description["address"]],
                os.environ,
                folder / "watch.log",
            )
            end = float("inf")
            while raylet.poll() is None and time.monotonic() < end:
                if end == float("inf") and (seconds := _notice(folder)) is not None:
                    metadata.give_notice(seconds)
                    end = time.monotonic() + seconds
                time.sleep(DECISION_INTERVAL_S)
    finally:
        _end_descendants()


def _end_descendants() -> None:
    """Kill all descendants, also those that they start meanwhile. A second SIGTERM does not interrupt this."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while alive := [process for process in descendants(psutil.Process()) if is_alive(process)]:
        for process in alive:
            send_signal(process, signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)


def _start_ray(description: dict[str, Any], folder: Path) -> "subprocess.Popen[bytes]":
    """Start a Ray node. Nodes start one after another, because one of two that start at once on the same computer can hang."""
    with (folder.parent / "starting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        raylet = _start(_ray_start(description), {**os.environ, **description["env"]}, folder / "ray.log")
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"Ray runtime started" not in (folder / "ray.log").read_bytes() and raylet.poll() is None:
            if time.monotonic() > deadline:
                sys.exit(f"the Ray node did not start within {START_TIMEOUT_S:g} s")
            time.sleep(DECISION_INTERVAL_S)
        return raylet


def _notice(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        return float((folder / NOTICE).read_text())
    return None


def _ray_start(description: dict[str, Any]) -> list[str]:
    resources = description["resources"]
    return [
        *(
            description["python"],
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            f"--address={description['address']}",
        ),
        *(f"--num-cpus={resources.get('CPU', 0):g}", f"--num-gpus={resources.get('GPU', 0):g}"),
        *(f"--object-store-memory={200 * 2**20}", "--disable-usage-stats", "--include-log-monitor=False"),
        "--dashboard-agent-listen-port=0",
    ]


def _start(command: list[str], env: Any, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as sink:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, preexec_fn=_end_with_parent
        )


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main()
