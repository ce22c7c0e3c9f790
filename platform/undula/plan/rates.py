"""Rates that were measured on a device and on the links between workers, and the file that keeps them. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from undula.plan.scaling import Link
from undula.plan.work import DeviceRates, Work

LEAST_LEFT = 0.1
"""Least part of a pass that is not the host's work, in case that noise of the smallest pass says otherwise."""


@dataclass(frozen=True)
class TimedPass:
    """Work and duration of the forward and the backward pass of a model for one batch."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class MeasuredRates:
    """Rates of a kind of worker."""

    device: str
    """Name of its device, for people."""
    memory_bytes: float
    """Memory of the device."""
    cpus: float
    """Number of CPUs that a worker has."""
    rates: Mapping[str, DeviceRates]
    """Rates by number format of a worker that is alone on its node."""
    full: Mapping[str, DeviceRates]
    """Rates of a worker whose node has as many of them as it has room for, which share caches, memory and the power of a chip."""
    workers_per_node: int
    """Number of workers for which a node has room."""
    link: Link | None
    """Link between two workers; None if it was not measured."""

    def of(self, compute: str, workers: int) -> DeviceRates:
        """Return the rates in a number format of a worker if some workers train, of which a node has as many as it has room for."""
        together = min(workers, self.workers_per_node)
        share = (together - 1) / max(self.workers_per_node - 1, 1)
        return self.rates[compute].mixed(self.full[compute], share)

    def as_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=1)


def read_rates(text: str) -> MeasuredRates:
    """Return the rates in a file.

    Raises:
        ValueError: It has other content.
    """
    try:
        tree = json.loads(text)
        alone, full = (
            {compute: DeviceRates(**each) for compute, each in tree[kind].items()} for kind in ("rates", "full")
        )
        if missing := alone.keys() ^ full.keys():
            raise KeyError(*missing)
        if not all(each.flops_per_s > 0 and each.bytes_per_s > 0 for each in (*alone.values(), *full.values())):
            raise ValueError("a rate is not positive")
        link = None if tree["link"] is None else Link(**tree["link"])
        memory, cpus, room = float(tree["memory_bytes"]), float(tree["cpus"]), int(tree["workers_per_node"])
        return MeasuredRates(str(tree["device"]), memory, cpus, alone, full, room, link)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def fit_rates(passes: Sequence[TimedPass], operation_s: float, is_async: bool) -> DeviceRates:
    """Fit the rates of a device to passes of several models, whose errors are relative and of equal size.

    Args:
        passes: Passes, of which some have more operations of matrix products for each byte than others. On a device that computes while the
            host is busy, they must be large enough for the host to wait.
        operation_s: Seconds for which the host is busy with an operation.
        is_async: Whether the device computes meanwhile.
    """
    host = [0.0 if is_async else operation_s * each.work.operations for each in passes]
    left = [max(each.seconds - busy, LEAST_LEFT * each.seconds) for each, busy in zip(passes, host, strict=True)]
    works = [each.work for each in passes]
    counts = np.array([(each.flops, each.moved_bytes, each.convolutions, each.kernel_bytes) for each in works])
    flop_s, byte_s, convolution_s, kernel_byte_s = _fitted(counts / np.array(left)[:, None])
    rates = [math.inf if seconds == 0 else 1 / seconds for seconds in (flop_s, byte_s)]
    return DeviceRates(rates[0], rates[1], operation_s, convolution_s, kernel_byte_s, is_async)


def _fitted(terms: NDArray[np.float64]) -> list[float]:
    """Return the factors, none of them negative, with which the columns add up to 1 in each row, by least squares.

    Of few columns, each choice can be tried: the best one whose factors are not negative is the solution (Lawson and Hanson, Solving Least
    Squares Problems, 1974, chapter 23).
    """
    columns, best, least = terms.shape[1], [0.0] * terms.shape[1], math.inf
    for chosen in product((False, True), repeat=columns):
        factors = np.zeros(columns)
        mask = np.array(chosen)
        factors[mask] = np.linalg.lstsq(terms[:, mask], np.ones(len(terms)), rcond=None)[0]
        error = float(np.square(terms @ factors - 1).sum())
        if (factors >= 0).all() and error < least:
            best, least = factors.tolist(), error
    return best
