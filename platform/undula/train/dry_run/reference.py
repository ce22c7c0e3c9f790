"""Rates of a device, from passes of reference models that are counted as those of a job are, and timed."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undula.parallel.precision import dtype_of
from undula.plan.precision import Compute
from undula.plan.rates import TimedPass, fit_rates
from undula.plan.work import DeviceRates
from undula.train.dry_run.storages import LiveStorages

TIMES = 7
"""Number of times that a pass is timed, of which the median counts."""
LONG_S = 0.15
"""Seconds of a pass after which no larger one of its family is timed."""
WAITING = 2.0
"""Duration of a pass, relative to that of the host's work, from which on a device that computes meanwhile decides."""


@dataclass(frozen=True)
class Reference:
    """Model with a batch."""

    module: nn.Module
    batch: Tensor

    def run(self, compute: Compute) -> None:
        """Do a forward and a backward pass."""
        dtype = dtype_of(compute)
        with torch.autocast(self.batch.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            output = self.module(self.batch)
        torch.autograd.backward(output.float().square().mean())


def transformers(device: torch.device) -> Iterator[Reference]:
    """Yield layers of transformers, from small to large."""
    for width, length, samples in (
        (64, 32, 1),
        (128, 256, 4),
        (256, 256, 8),
        (512, 256, 8),
        (1024, 512, 8),
        (2048, 1024, 8),
    ):
        layer = nn.TransformerEncoderLayer(
            width, width // 64 or 1, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        module = nn.Sequential(layer, nn.Linear(width, 256))
        yield Reference(module.to(device), torch.randn(samples, length, width, device=device))


def convolutions(device: torch.device) -> Iterator[Reference]:
    """Yield networks of convolutions with four stages, each with twice the channels and half the size of the one before, from small to
    large."""
    for channels, size, samples in ((4, 8, 2), (16, 8, 8), (16, 16, 16), (32, 32, 8), (64, 64, 16), (64, 112, 64)):
        widths = [channels, *(channels * 2**stage for stage in range(4) for _ in range(2))]
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 1, 1)]
        for before, after in pairwise(widths):
            stride = 1 if before == after else 2
            layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
        yield Reference(module.to(device), torch.randn(samples, 3, size, size, device=device))


FAMILIES: Sequence[Callable[[torch.device], Iterator[Reference]]] = (transformers, convolutions)


def measure(device: torch.device, compute: Compute) -> DeviceRates:
    """Measure the rates that a device reaches in models with a number format, which takes some seconds."""
    is_async = device.type != "cpu"
    timed = [[*_timed(family(device), compute, device)] for family in FAMILIES]
    operation_s = min(passes[0].seconds / passes[0].work.operations for passes in timed)
    larger = [each for passes in timed for each in passes[1:]]
    busy = [each for each in larger if not is_async or each.seconds > WAITING * operation_s * each.work.operations]
    return fit_rates(busy or larger, operation_s, is_async)


def _timed(references: Iterator[Reference], compute: Compute, device: torch.device) -> Iterator[TimedPass]:
    """Yield passes of references until one takes long, and at least two."""
    for number, reference in enumerate(references):
        reference.run(compute)
        with LiveStorages() as live:
            live.begin()
            reference.run(compute)
        seconds = median(_seconds(reference, compute, device) for _ in range(TIMES))
        yield TimedPass(live.work, seconds)
        if number and seconds > LONG_S:
            return


def _seconds(reference: Reference, compute: Compute, device: torch.device) -> float:
    _wait_for(device)
    began = time.perf_counter()
    reference.run(compute)
    _wait_for(device)
    return time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
