"""How a job scales, from runs of it on several numbers of workers: throughput, efficiency and where it is lost, and fitted laws. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from undula.errors import RunError
from undula.plan.scaling import ParallelShare, amdahl, fit_amdahl, fit_gustafson, gustafson
from undula.report.data.run_record import RecordedRun
from undula.report.data.summary import column, without_nan
from undula.state.events import GroupEvent, StartEvent

CLASSES = ("compute", "communication", "waiting", "data", "boundary")
"""Classes of the seconds of a step: forward and backward passes; communication that no pass hides, once all workers are ready; waiting for
the worker that is ready last; waiting for samples and their copies; all else between two steps, such as the optimizer and the ledger."""
FEWEST_TO_FIT = 3
"""Minimum number of measurements of a fit."""


@dataclass(frozen=True)
class Round:
    """One training on some number of workers."""

    number: int
    """Number of the round, from 1."""
    workers: int
    samples_per_s: float
    """Median over the measured steps."""
    samples: float
    """Mean number of samples of a measured step."""
    seconds: Mapping[str, float]
    """Seconds of a step by CLASSES, which add up to samples / samples_per_s. Empty for a training that is not Undula's."""


@dataclass(frozen=True)
class Throughput:
    """Throughput of some number of workers over all rounds, in samples per second."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> "Throughput":
        rates = [each.samples_per_s for each in rounds]
        return cls(median(rates), min(rates), max(rates))


@dataclass(frozen=True)
class Size:
    """Measurements of some number of workers."""

    workers: int
    is_oversubscribed: bool
    """Whether a machine had fewer cores than its workers need. Such a size takes no part in fits."""
    throughput: Throughput
    seconds: Mapping[str, float]
    """Seconds of a step by CLASSES, which add up to a step at the median throughput."""
    speedup: float
    """Throughput as a multiple of that of the smallest size, times the number of its workers, so that `workers` is ideal."""
    lost: Mapping[str, float]
    """Part of the efficiency that is lost, by CLASSES; negative where workers take less time for a sample than at the smallest size."""
    baseline: Throughput | None = None
    """Throughput of the other training with the same number of workers."""
    ratio: float | None = None
    """Throughput as a multiple of the other training's, median over the rounds of the ratios within a round."""
    expected: float | None = None
    """Throughput in samples per second that was expected before the runs; None if none was."""

    @property
    def efficiency(self) -> float:
        """Speedup for each worker; 1 is ideal."""
        return self.speedup / self.workers


@dataclass(frozen=True)
class Fit:
    """Law of scaling that was fitted to the measurements."""

    law: Literal["Amdahl", "Gustafson"]
    share: ParallelShare
    one: Mapping[str, float]
    """Fitted throughput of one worker in samples per second, for `value`, `low` and `high` of the share."""
    serial: Mapping[str, float]
    """Serial share by CLASSES, in proportion to what the largest size loses to each."""

    def speedup(self, workers: float, of: Literal["value", "low", "high"] = "value") -> float:
        """Return the speedup over one worker, for the fitted share or an end of its interval."""
        return float(_law(self.law)(getattr(self.share, of), workers))


@dataclass(frozen=True)
class Scaling:
    """How a job scales."""

    name: str
    is_weak: bool
    """Whether each worker has the same work, instead of all workers together."""
    steps: int
    """Number of measured steps of each run."""
    rounds: int
    sizes: tuple[Size, ...]
    """Sizes in ascending order of their workers."""
    fit: Fit | None
    no_fit: str
    """Reason for which there is no fit, as a clause; empty if there is one."""
    environment: Mapping[str, str]
    """Properties of the machines and libraries, by name."""

    def as_json(self) -> dict[str, Any]:
        """Return the measurements as a JSON object. Numbers that are not finite become null."""
        tree = asdict(self)
        for entry, size in zip(tree["sizes"], self.sizes, strict=True):
            entry["efficiency"] = size.efficiency
        found: dict[str, Any] = without_nan(tree)
        return found


def measured(run: RecordedRun, workers: int, number: int, warmup: int) -> Round:
    """Return the measurement of a run.

    Args:
        run: Run with a fixed number of workers.
        workers: That number.
        number: Number of the round.
        warmup: Number of steps at the beginning that do not count, at least 1.

    Raises:
        RunError: The run has too few steps, or has lost a worker.
    """
    steps = run.ledger.steps
    if len(run.ledger.replaced) or set(steps["world_size"].to_pylist()) - {workers}:
        raise RunError(
            f"the run with {workers} workers in round {number} has lost a worker on the way, so its times do not count; run the command "
            "again"
        )
    if len(steps) <= warmup:
        raise RunError(
            f"the run with {workers} workers has {len(steps)} steps, and the first {warmup} do not count; raise --steps, or plan.epochs if "
            "the data have no more steps"
        )
    counted = steps.slice(warmup)
    durations = np.diff(column(steps, "time"))[warmup - 1 :]
    samples = column(counted, "step_samples")
    rate = float(np.median(samples / np.maximum(durations, 1e-9)))
    means = {name: float(np.nan_to_num(column(counted, name)).mean()) for name in _MEASURED}
    waiting = min(means["wait_s"], means["communication_s"])
    seconds = {
        "compute": means["compute_s"],
        "communication": means["communication_s"] - waiting,
        "waiting": waiting,
        "data": means["data_s"] + means["transfer_s"],
    }
    seconds["boundary"] = max(float(durations.mean()) - sum(seconds.values()), 0.0)
    return Round(number, workers, rate, float(samples.mean()), _scaled(seconds, float(samples.mean()) / rate))


def of_other(seconds: Sequence[float], samples: float, workers: int, number: int, warmup: int) -> Round:
    """Return the measurement of another training than Undula's.

    Args:
        seconds: Duration of each step.
        samples: Samples in a step.
        workers: Number of its workers.
        number: Number of the round.
        warmup: Number of steps at the beginning that do not count.

    Raises:
        RunError: It has too few steps.
    """
    if len(seconds) <= warmup:
        raise RunError(
            f"the command of --against has written {len(seconds)} steps, and the first {warmup} do not count; let it train for {{steps}} "
            "steps"
        )
    return Round(number, workers, samples / median(seconds[warmup:]), samples, {})


_MEASURED = ("compute_s", "communication_s", "wait_s", "data_s", "transfer_s")


def _scaled(parts: Mapping[str, float], total: float) -> dict[str, float]:
    """Return parts in the same proportion that add up to a total."""
    factor = total / (sum(parts.values()) or 1.0)
    return {name: part * factor for name, part in parts.items()}


def is_oversubscribed(run: RecordedRun) -> bool:
    """Return whether a machine has fewer cores than its workers need, according to the record of a run whose workers train on CPUs.

    Each worker counts as `workers.cpus` cores, and as at least one. The machines count as alike.
    """
    start = next((event for event in run.events if isinstance(event, StartEvent)), None)
    group = next((event for event in run.events if isinstance(event, GroupEvent)), None)
    if start is None or group is None or start.cores is None or "the GPU" in start.arithmetic:
        return False
    nodes = [worker.get("node", "") for worker in group.workers]
    cpus = math.ceil(max(float(run.job.spec.get("workers", {}).get("cpus", 1.0)), 1.0))
    return max(map(nodes.count, nodes)) * cpus > start.cores


def environment(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Return the machines and libraries of runs as their ledgers record them, with all values where they differ."""
    values: dict[str, list[str]] = {}
    for run in runs:
        found: dict[str, str] = {}
        for event in run.events:
            if isinstance(event, StartEvent):
                found |= {"cores": str(event.cores or "unknown"), **event.arithmetic}
            if isinstance(event, GroupEvent):
                kinds = {worker["machine"] for worker in event.workers if "machine" in worker}
                found |= {"machines": ", ".join(sorted(kinds))} if kinds else {}
        for name, value in found.items():
            values.setdefault(name.removeprefix("the "), []).append(value)
    return {name: ", ".join(dict.fromkeys(each)) for name, each in values.items()}


def scaling_of(
    name: str,
    is_weak: bool,
    steps: int,
    rounds: Sequence[Round],
    oversubscribed: Sequence[int],
    environment: Mapping[str, str],
    others: Sequence[Round] = (),
    expected: Mapping[int, float] = MappingProxyType({}),
) -> Scaling:
    """Return how a job scales.

    Args:
        name: Name of the job.
        is_weak: Whether each worker has the same work.
        steps: Number of measured steps of each run.
        rounds: Measurements of the job.
        oversubscribed: Numbers of workers for which machines have too few cores.
        environment: Properties of the machines and libraries, by name.
        others: Measurements of another training.
        expected: Throughput in samples per second that was expected, by number of workers.
    """
    by_size = {workers: [each for each in rounds if each.workers == workers] for workers in _sizes(rounds)}
    first = by_size[min(by_size)]
    measured = {
        workers: _size(own, first, workers in oversubscribed, [each for each in others if each.workers == workers])
        for workers, own in by_size.items()
    }
    sizes = tuple(replace(size, expected=expected.get(workers)) for workers, size in measured.items())
    counted = [size for size in sizes if not size.is_oversubscribed]
    fit, no_fit = _fit(is_weak, [each for size in counted for each in by_size[size.workers]], counted)
    return Scaling(name, is_weak, steps, max(each.number for each in rounds), sizes, fit, no_fit, dict(environment))


def _sizes(rounds: Sequence[Round]) -> list[int]:
    return sorted({each.workers for each in rounds})


def _size(own: Sequence[Round], first: Sequence[Round], is_oversubscribed: bool, others: Sequence[Round]) -> Size:
    """Return the measurements of a size.

    Args:
        own: Its rounds.
        first: Rounds of the smallest size.
        is_oversubscribed: Whether machines have too few cores.
        others: Rounds of another training with the same number of workers.
    """
    workers, rate, first_rate = own[0].workers, Throughput.of(own), Throughput.of(first)
    spent, first_spent = _worker_seconds(own), _worker_seconds(first)
    each = sum(spent.values())
    by_round = {other.number: other.samples_per_s for other in others}
    ratios = [one.samples_per_s / by_round[one.number] for one in own if one.number in by_round]
    return Size(
        workers,
        is_oversubscribed,
        rate,
        _scaled(spent, fmean(one.samples for one in own) / rate.median),
        first[0].workers * rate.median / first_rate.median,
        {name: (spent[name] - first_spent[name]) / each for name in CLASSES},
        Throughput.of(others) if others else None,
        median(ratios) if ratios else None,
    )


def _worker_seconds(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the seconds of all workers together for a sample, by CLASSES, at the median throughput."""
    means = {name: fmean(each.seconds[name] for each in rounds) for name in CLASSES}
    return _scaled(means, rounds[0].workers / Throughput.of(rounds).median)


def _fit(is_weak: bool, rounds: Sequence[Round], sizes: Sequence[Size]) -> tuple[Fit | None, str]:
    """Return the fitted law, or None and the reason for which there is none."""
    if len(sizes) < 2:
        return None, "it needs at least two numbers of workers for which there are enough cores"
    if len(rounds) < FEWEST_TO_FIT:
        return None, f"it needs at least {FEWEST_TO_FIT} measurements, so more rounds or numbers of workers"
    workers = [each.workers for each in rounds]
    if is_weak:
        law, share = "Gustafson", fit_gustafson(workers, [each.workers / each.samples_per_s for each in rounds])
    else:
        law, share = "Amdahl", fit_amdahl(workers, [1 / each.samples_per_s for each in rounds])
    ends = {of: getattr(share, of) for of in ("value", "low", "high")}
    one = {
        of: math.exp(fmean(math.log(each.samples_per_s / _law(law)(end, each.workers)) for each in rounds))
        for of, end in ends.items()
    }
    lost = {name: max(part, 0.0) for name, part in sizes[-1].lost.items()}
    return Fit("Gustafson" if is_weak else "Amdahl", share, one, _scaled(lost, 1 - share.value)), ""


def _law(name: str) -> Callable[[float, float], float]:
    return gustafson if name == "Gustafson" else amdahl
