"""Laws of scaling: how much faster more workers are, and how long messages take. Pure.

Amdahl (AFIPS 1967): with a share p of the time of one worker in parallel, W workers are 1 / (1 - p + p / W) times as fast. Gustafson (CACM
31(5), 1988): if each worker brings as much work as one, they do 1 - p + p W times as much in the time, where p is the parallel share of
the time of W workers.

A message of n bytes takes alpha + n / beta seconds (Hockney, Parallel Computing 20, 1994), and collectives consist of messages (Thakur,
Rabenseifner and Gropp, IJHPCA 19(1), 2005).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from undula.plan.tree import assign, roots

CONFIDENCE = 0.9
"""Probability with which an interval contains the true value."""
_SHARES: NDArray[np.float64] = np.concatenate([[0.0], 1 - np.logspace(0, -5, 4001)[1:], [1.0]])
"""Parallel shares among which a fit chooses, closer to each other towards 1, where speedups differ most."""


def amdahl(parallel: float, workers: float) -> float:
    """Return the speedup of some workers over one for the same work."""
    return 1 / (1 - parallel + parallel / workers)


def gustafson(parallel: float, workers: float) -> float:
    """Return how many times the work of one worker several do in the same time, each with as much work as the one."""
    return 1 - parallel + parallel * workers


@dataclass(frozen=True)
class ParallelShare:
    """Share of a step's time that more workers divide among themselves, fitted to measurements."""

    value: float
    low: float
    """Lower bound of its interval of CONFIDENCE."""
    high: float
    """Upper bound of its interval of CONFIDENCE."""

    @property
    def most(self) -> float:
        """Speedup that no number of workers exceeds; infinite if everything is parallel."""
        return math.inf if self.value >= 1 else 1 / (1 - self.value)


def fit_amdahl(workers: Sequence[int], seconds: Sequence[float]) -> ParallelShare:
    """Fit Amdahl's law to durations of the same work.

    The errors of durations are relative and of equal size, so logarithms are fitted by least squares. The interval has the shares whose
    likelihood ratio an F distribution does not reject (Bates and Watts, Nonlinear Regression Analysis, 1988, section 6.1).

    Args:
        workers: Number of workers of each measurement, of at least two sizes.
        seconds: Duration of each measurement, at least three.
    """
    return _fitted(np.log(seconds), np.log(1 - _SHARES + _SHARES / np.reshape(workers, (-1, 1))).T)


def fit_gustafson(workers: Sequence[int], seconds: Sequence[float]) -> ParallelShare:
    """Fit Gustafson's law to durations in which each worker has the same work, as `fit_amdahl` does.

    Args:
        workers: Number of workers of each measurement, of at least two sizes.
        seconds: Duration of each measurement, at least three.
    """
    sizes = np.reshape(workers, (-1, 1))
    return _fitted(np.log(seconds), np.log(sizes / (1 - _SHARES + _SHARES * sizes)).T)


def _fitted(logarithms: NDArray[np.float64], expected: NDArray[np.float64]) -> ParallelShare:
    """Fit a share of _SHARES to logarithms of durations.

    Args:
        logarithms: Logarithms of the measured durations; shape [measurements].
        expected: Logarithms that each share predicts, up to a constant for all measurements; shape [shares, measurements].
    """
    residuals = logarithms - expected
    errors = ((residuals - residuals.mean(1, keepdims=True)) ** 2).sum(1)
    best, freedom = errors.min(), len(logarithms) - 2
    # The quantile of F with 1 and n degrees of freedom is the square of Student's for both tails.
    accepted = _SHARES[errors <= best * (1 + student_quantile(CONFIDENCE, freedom) ** 2 / freedom)]
    return ParallelShare(float(_SHARES[errors.argmin()]), float(accepted.min()), float(accepted.max()))


def student_quantile(confidence: float, freedom: int) -> float:
    """Return the number that a value of Student's distribution exceeds in size with probability 1 - `confidence`.

    Args:
        confidence: Probability from 0 to 1, without both ends.
        freedom: Degrees of freedom, at least 1.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # halves the interval of the angle to the precision of a float
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return the probability that Student's t is between -x and x, for x = sqrt(freedom) tan(angle).

    The sums are those of Abramowitz and Stegun, Handbook of Mathematical Functions, 1964, 26.7.3 and 26.7.4.
    """
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for above in range(2 + is_odd, freedom - 1, 2):
        term *= (above - 1) / above * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


@dataclass(frozen=True)
class Link:
    """Link between two workers."""

    latency_s: float
    """Duration of an empty message in seconds."""
    bytes_per_s: float

    def message_s(self, size: float) -> float:
        """Return the duration of a message of some bytes."""
        return self.latency_s + size / self.bytes_per_s

    def ring_s(self, size: float, workers: int) -> float:
        """Return the duration of an all-reduce of some bytes on a ring, in which each worker sends a part of them at a time."""
        return 2 * (workers - 1) * self.message_s(size / workers)

    def exchange_s(self, size: float, virtual_workers: int, workers: int) -> float:
        """Return the duration of the exchange of a gradient of some bytes along the tree of `undula.plan.tree`.

        Each worker sends its slice of each of its roots to each other one, and then the sum of its own slice. The messages of a phase share
        the link, and the phase ends with the worker that sends most.
        """
        if workers == 1:
            return 0.0
        counts = [len(roots(virtual_workers, each.start, each.stop)) for each in assign(virtual_workers, workers)]
        if counts == [1, 1]:
            return self.message_s(size)
        sent = size / workers * (workers - 1)
        return 2 * self.latency_s + (max(counts) + 1) * sent / self.bytes_per_s


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Fit a link to durations of messages, whose errors are relative.

    Args:
        sizes: Bytes of each message, of at least two sizes.
        seconds: Duration of each message.
    """
    weights = 1 / np.asarray(seconds)
    terms = np.stack([weights, np.asarray(sizes) * weights], 1)
    latency_s, s_per_byte = np.linalg.lstsq(terms, np.ones(len(weights)), rcond=None)[0]
    return Link(max(float(latency_s), 0.0), math.inf if s_per_byte <= 0 else float(1 / s_per_byte))
