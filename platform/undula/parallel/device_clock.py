"""Marks on the time line of a device, to tell where the seconds of a step go without waiting for the device."""

import time
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in time on a device."""

    def seconds_since(self, start: "Mark") -> float: ...


class HostMark:
    """Now, on the host's clock."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def seconds_since(self, start: Mark) -> float:
        assert isinstance(start, HostMark)
        return self.time_s - start.time_s


class CudaMark:
    """The moment at which the GPU gets to this point of its current stream; reading it waits until it has."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def seconds_since(self, start: Mark) -> float:
        assert isinstance(start, CudaMark)
        self.event.synchronize()
        return float(start.event.elapsed_time(self.event)) / 1e3


def mark_on(device: torch.device) -> Mark:
    """A mark at the present point of the device's work."""
    return CudaMark() if device.type == "cuda" else HostMark()
