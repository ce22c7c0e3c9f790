"""Rates that were measured on a device and on the links between workers, and the file that keeps them. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from undula.plan.scaling import Link
from undula.plan.step_time import DeviceRates


@dataclass(frozen=True)
class TimedPass:
    """A forward and a backward pass of a model, as it was counted and timed."""

    flops: float
    """Operations of matrix products, convolutions and attention."""
    moved_bytes: float
    """What the other operations have read and written."""
    operations: int
    seconds: float


@dataclass(frozen=True)
class MeasuredRates:
    """Rates of a kind of worker."""

    device: str
    """Name of its device, for people."""
    memory_bytes: float
    """Memory of the device."""
    rates: Mapping[str, DeviceRates]
    """Rates by number format."""
    link: Link | None
    """Link between two workers; None if it was not measured."""

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
        rates = {compute: DeviceRates(**each) for compute, each in tree["rates"].items()}
        link = None if tree["link"] is None else Link(**tree["link"])
        return MeasuredRates(str(tree["device"]), float(tree["memory_bytes"]), rates, link)
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
    left = [each.seconds - (0.0 if is_async else operation_s * each.operations) for each in passes]
    terms = np.array([(each.flops, each.moved_bytes) for each in passes]) / np.array(left)[:, None]
    (flop_s, byte_s), *_ = np.linalg.lstsq(terms, np.ones(len(passes)), rcond=None)
    if flop_s <= 0 or byte_s <= 0:  # one kind of operation explains all durations
        best = min((0, 1), key=lambda column: np.square(terms[:, column] / terms[:, column].mean() - 1).sum())
        share = terms[:, best].sum() / np.square(terms[:, best]).sum()
        flop_s, byte_s = (share, 0.0) if best == 0 else (0.0, share)
    rate_of = [math.inf if seconds <= 0 else 1 / float(seconds) for seconds in (flop_s, byte_s)]
    return DeviceRates(rate_of[0], rate_of[1], operation_s, is_async)
