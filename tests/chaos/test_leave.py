"""Test of `undula spot leave` on a real cluster, as docs/kuberay-rayjob.yaml calls it at the end of a pod."""

import subprocess
import sys
import time

from undula.testing.nodes import Nodes

LEAVE = [sys.executable, "-m", "undula.cli", "spot", "leave"]
NOTICE_S = 60.0


def leave(spot: Nodes, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [*LEAVE, "--cluster", spot.cluster.address, "--notice", str(NOTICE_S), *options]
    return subprocess.run(command, env=spot._env, capture_output=True, text=True, timeout=2 * NOTICE_S)


def test_leave_waits_until_the_node_is_gone(spot: Nodes) -> None:
    node = spot.add()
    spot.await_all()
    began = time.monotonic()
    done = leave(spot, "--node", node)
    assert done.returncode == 0, done.stderr
    assert f"Ray drains {node[:8]}" in done.stdout
    assert time.monotonic() - began < NOTICE_S  # an idle node is drained at once
    assert node not in spot.alive()
    spot.kill(node)
