"""Configurations in which a job could train, each with its memory, its speed and its price, and the choice among them. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Generic, Literal, TypeVar, assert_never

from undula.plan.gpus import CONTEXT_BYTES, MARGIN, Gpu
from undula.plan.memory import Parts, PassCount, StateCount, division_of
from undula.plan.plan import PlanSpec
from undula.plan.scaling import Link
from undula.plan.step_memory import moments, peak
from undula.plan.step_time import StepSeconds, step_seconds
from undula.plan.work import DeviceRates

MATMUL_EFFICIENCY = 0.6
"""Share of the peak of a GPU's data sheet that large matrix products reach in a model."""
MEMORY_EFFICIENCY = 0.8
"""Share of the bandwidth of a GPU's memory that other operations reach."""
LAUNCH_S = 8e-6
"""Seconds for which the host is busy with an operation of torch in eager mode."""
OUTAGE_S = 20.0
"""Seconds for which training stands still when the number of workers changes."""
ASSUMED_LINK = Link(1e-4, 10e9 / 8)
"""Link between two workers, if nothing is known about it: 0.1 ms and 10 Gbit/s."""
Setting = TypeVar("Setting")
TargetKind = Literal["hours", "dollars", "samples/s", "tokens/s"]


def rates_of(gpu: Gpu, compute: str, _workers: int = 1) -> DeviceRates:
    """Return the rates that a GPU probably reaches in a model, with any number of workers."""
    flops = gpu.tflops[compute] * 1e12 * MATMUL_EFFICIENCY  # type: ignore[index]
    return DeviceRates(flops, gpu.gb_per_s * 1e9 * MEMORY_EFFICIENCY, LAUNCH_S)


@dataclass(frozen=True)
class Offer:
    """Price of a worker with one GPU."""

    gpu: Gpu
    machine: str
    """Machine type, of which a worker has the share of one GPU."""
    hourly: float | None
    """Price on demand of the worker in US dollars per hour; None if no price list has one."""
    hourly_spot: float | None
    """Its spot price."""
    link: Link | None = None
    """Measured link between two such workers; None for the one that the plan assumes."""


@dataclass(frozen=True)
class Kind(Generic[Setting]):
    """A way to compute, and what was counted of it."""

    setting: Setting
    compute: str
    passes: PassCount


@dataclass(frozen=True)
class Candidate(Generic[Setting]):
    """A configuration in which a job could train."""

    offer: Offer
    setting: Setting
    samples: int
    """Number of samples of a micro-batch."""
    workers: int
    memory: Parts
    """Memory of the worker that needs most, at the moment that takes most."""
    room_bytes: float
    """Memory of the GPU."""
    step: StepSeconds
    samples_per_s: float
    tokens_per_s: float | None
    """Tokens per second; None if the number of tokens of a sample is not known."""
    efficiency: float
    """Speed, relative to that of as many workers that lose nothing to each other."""
    mfu: float
    """Operations of the model without what is recomputed, relative to the peak of the GPUs."""
    hours: float
    """Duration of the run on nodes that stay."""
    spot_hours: float
    """Duration of the run on spot nodes, with the outages of their changes."""

    @property
    def needed_bytes(self) -> float:
        """Memory that torch's allocator probably takes."""
        return (self.memory.total - self.memory.context) * (1 + MARGIN) + self.memory.context

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.room_bytes

    @property
    def dollars(self) -> float | None:
        """Price of the run on demand."""
        return None if self.offer.hourly is None else self.offer.hourly * self.workers * self.hours

    @property
    def spot_dollars(self) -> float | None:
        """Price of the run on spot nodes."""
        return None if self.offer.hourly_spot is None else self.offer.hourly_spot * self.workers * self.spot_hours


@dataclass(frozen=True)
class Workload(Generic[Setting]):
    """Job whose configurations are compared."""

    state: StateCount
    kinds: Sequence[Kind[Setting]]
    plan: PlanSpec
    steps: int
    wire: float = 1.0
    """Bytes of a number in the sums of gradients, relative to those in a gradient."""
    stage: int = 0
    """Stage of sharding; 0 if each worker has the whole model."""
    tokens: int | None = None
    """Number of tokens of each sample; None if it is not known."""


def candidates(
    workload: Workload[Setting],
    offers: Sequence[Offer],
    workers: Sequence[int],
    link: Link,
    changes_per_hour: float,
    rates: Callable[[Gpu, str, int], DeviceRates] = rates_of,
) -> Iterator[Candidate[Setting]]:
    """Yield all configurations.

    Args:
        workload: The job.
        offers: Kinds of workers.
        workers: Numbers of workers.
        link: Link between two workers.
        changes_per_hour: Number of times in an hour that a spot worker is taken.
        rates: Function that returns the rates of a GPU in a number format if some workers train.
    """
    least: dict[str, float] = {}
    for each in workload.kinds:
        least[each.compute] = min(least.get(each.compute, inf), each.passes.work.flops / each.passes.samples)
    for offer in offers:
        for kind in workload.kinds:
            for count in workers:
                between = offer.link or link
                yield _candidate(workload, offer, kind, count, between, changes_per_hour, rates, least[kind.compute])


def _candidate(
    workload: Workload[Setting],
    offer: Offer,
    kind: Kind[Setting],
    workers: int,
    link: Link,
    changes_per_hour: float,
    rates: Callable[[Gpu, str, int], DeviceRates],
    flops_of_sample: float,
) -> Candidate[Setting]:
    passes, compute = kind.passes, kind.compute
    divided = partial(division_of, workload.plan, passes.samples, wire=workload.wire, stage=workload.stage)
    division = divided(workers)
    memory = peak(moments(workload.state, passes, division, context=CONTEXT_BYTES))
    step = step_seconds(workload.state, passes, division, rates(offer.gpu, compute, workers), link)
    batch = workload.plan.global_batch
    alone = step_seconds(workload.state, passes, divided(1), rates(offer.gpu, compute, 1), link)
    speed = batch / step.total
    hours = workload.steps * step.total / 3600
    # Of each hour, the changes of all workers take their outages.
    goodput = 1 / (1 + changes_per_hour * workers * OUTAGE_S / 3600)
    peak_flops = offer.gpu.tflops[compute] * 1e12 * workers  # type: ignore[index]
    return Candidate(
        offer,
        kind.setting,
        passes.samples,
        workers,
        memory,
        offer.gpu.memory_bytes,
        step,
        speed,
        None if workload.tokens is None else workload.tokens * speed,
        alone.total / step.total / workers,
        flops_of_sample * speed / peak_flops,
        hours,
        hours / goodput,
    )


def cheapest(found: Sequence[Candidate[Setting]]) -> Candidate[Setting] | None:
    """Return the configuration that fits and costs least; None if none fits or has a price."""
    priced = [(min(prices), each) for each in found if each.fits and (prices := prices_of(each))]
    return min(priced, key=lambda pair: (pair[0], pair[1].hours), default=(0.0, None))[1]


def fastest(found: Sequence[Candidate[Setting]]) -> Candidate[Setting] | None:
    """Return the configuration that fits and takes least time, of equal ones that which costs least; None if none fits."""
    return min(
        (each for each in found if each.fits),
        key=lambda each: (round(each.hours, 6), min(prices_of(each), default=0.0)),
        default=None,
    )


@dataclass(frozen=True)
class Target:
    """What a run must achieve."""

    kind: TargetKind
    limit: float
    """Most hours or dollars, or fewest samples or tokens per second."""

    def is_met(self, candidate: Candidate[Any]) -> bool:
        match self.kind:
            case "hours":
                return candidate.hours <= self.limit
            case "dollars":
                return min(prices_of(candidate), default=inf) <= self.limit
            case "samples/s":
                return candidate.samples_per_s >= self.limit
            case "tokens/s":
                return (candidate.tokens_per_s or 0.0) >= self.limit
            case _:
                assert_never(self.kind)


def chosen(found: Sequence[Candidate[Setting]], target: Target | None) -> Candidate[Setting] | None:
    """Return the fastest configuration within a price, or else the cheapest one that meets the target; None if none does."""
    meeting = [each for each in found if target is None or target.is_met(each)]
    if target and target.kind == "dollars":
        return fastest(meeting)
    return cheapest(meeting) or fastest(meeting)  # a worker that was measured has no price


def prices_of(candidate: Candidate[Setting]) -> list[float]:
    """Return the known prices of a run in US dollars."""
    return [price for price in (candidate.dollars, candidate.spot_dollars) if price is not None]
