"""Timestamps on a device, which measure the parts of a step, and scalars from it. Only reading either waits for the device."""

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """Timestamp on a device."""

    def seconds_since(self, start: "Mark") -> float: ...


class HostMark:
    """Timestamp on the host's clock."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def seconds_since(self, start: Mark) -> float:
        assert isinstance(start, HostMark)
        return self.time_s - start.time_s


class CudaMark:
    """Time at which the GPU reaches this point of its current stream. Reading it waits until the GPU has reached the point."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def seconds_since(self, start: Mark) -> float:
        assert isinstance(start, CudaMark)
        self.event.synchronize()
        return float(start.event.elapsed_time(self.event)) / 1e3


def mark_on(device: torch.device) -> Mark:
    """Record a timestamp at the current point of the device's work."""
    return CudaMark() if device.type == "cuda" else HostMark()


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of scalars. Those on a GPU are copied together, so that this waits once."""
    there = [scalar for scalar in scalars if scalar.device.type != "cpu"]
    copied = iter(torch.stack([scalar.detach().double() for scalar in there]).tolist() if there else ())
    return [float(scalar) if scalar.device.type == "cpu" else next(copied) for scalar in scalars]
