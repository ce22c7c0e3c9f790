"""Link between two network namespaces with a chosen delay and rate, for kernels with and without netem.

Each namespace has a TUN device. A process passes the packets of each direction on, no faster than the rate, and after the delay.
"""

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAMES = ("undula-a", "undula-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "shaped0"
MTU = 9000
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
BUFFER = "4096 16777216 67108864"
SYSCTLS = {
    "net.ipv4.tcp_slow_start_after_idle": "0",  # otherwise each message begins with a small window
    "net.ipv4.tcp_wmem": BUFFER,
    "net.ipv4.tcp_rmem": BUFFER,
}


@contextmanager
def shaped_link(delay_s: float, bytes_per_s: float) -> Iterator[None]:
    """Make the namespaces and the link for the time of a block.

    Args:
        delay_s: Seconds for which each packet travels.
        bytes_per_s: Rate of each direction.
    """
    for name in NAMES:
        _ip("netns", "add", name)
    relay = subprocess.Popen([sys.executable, __file__, str(delay_s), str(bytes_per_s)], stdout=subprocess.PIPE)
    try:
        assert relay.stdout is not None
        assert relay.stdout.readline(), "the relay has not started"
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "mtu", str(MTU), "up")
            _ip("-n", name, "link", "set", "lo", "up")
            settings = [f"{key}={value}" for key, value in SYSCTLS.items()]
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", *settings], check=True)
        yield
    finally:
        relay.kill()
        relay.wait()
        for name in NAMES:
            _ip("netns", "del", name)


def can_shape() -> bool:
    """Return whether this process may make namespaces and TUN devices."""
    try:
        with shaped_link(0.001, 1e8):
            return True
    except (OSError, subprocess.SubprocessError, AssertionError):
        return False


def in_namespace(name: str, *command: str) -> "subprocess.Popen[str]":
    """Start a command in a namespace."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _open_device(namespace: str) -> int:
    """Return the file of a new TUN device in a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def _relay(delay_s: float, bytes_per_s: float) -> None:
    """Pass packets on until this process is ended."""
    devices = [_open_device(name) for name in NAMES]
    print("ready", flush=True)
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free_at = [0.0, 0.0]
    while True:
        due = min((queue[0][0] for queue in waiting if queue), default=None)
        left = None if due is None else max(due - time.monotonic() - 1e-4, 0.0)
        for device in select.select(devices, [], [], left)[0]:
            side = devices.index(device)
            packet = os.read(device, MTU + 100)
            free_at[side] = max(time.monotonic(), free_at[side]) + len(packet) / bytes_per_s
            waiting[side].append((free_at[side] + delay_s, packet))
        for side, queue in enumerate(waiting):
            while queue and queue[0][0] <= time.monotonic():
                packet = queue.popleft()[1]
                with suppress(OSError):  # while the other device is not up
                    os.write(devices[1 - side], packet)


if __name__ == "__main__":
    _relay(float(sys.argv[1]), float(sys.argv[2]))
