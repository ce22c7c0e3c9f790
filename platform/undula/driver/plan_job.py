"""Plan of a job before GPUs are rented: what its script counts, put together with kinds of GPUs, numbers of workers and prices."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from undula.config.job import JobSpec, absolute_paths, load_spec, script_of
from undula.config.secrets import has_secret
from undula.config.yaml_edit import with_values
from undula.driver.count_job import JobCount, counted_by_script, passes_of, setting_of, sizes_of
from undula.errors import SpecError, one_line
from undula.plan.candidates import (
    Candidate,
    Kind,
    Offer,
    Target,
    TargetKind,
    Workload,
    candidates,
    chosen,
    fastest,
    rates_of,
)
from undula.plan.fleet import ON_DEMAND, SPOT
from undula.plan.gpus import GIB, GPUS, Gpu
from undula.plan.memory import division_of
from undula.plan.precision import Compute
from undula.plan.prices import Machine, Prices
from undula.plan.rates import MeasuredRates, read_rates
from undula.plan.scaling import Link
from undula.plan.step_time import step_seconds
from undula.plan.work import DeviceRates
from undula.train.dry_run.counting import Setting

SHARDED = "sharding.stage=3"
"""Override with which a model is counted for all stages of sharding."""


@dataclass(frozen=True)
class Higher:
    """What fits with a higher stage of sharding than that of a job."""

    stage: int
    candidate: Candidate[Setting]
    own: Setting
    """Setting of the job's YAML."""


@dataclass(frozen=True)
class Planned:
    """Configurations of a job."""

    own: Setting
    """Setting of the job's YAML."""
    counted: JobCount
    candidates: tuple[Candidate[Setting], ...]
    higher: Higher | None = None
    """What fits with the lowest higher stage of sharding that helps, if nothing fits as the job is."""

    def choice(self, target: Target | None) -> Candidate[Setting] | None:
        """Return the configuration that meets a target best; None if none does.

        Raises:
            SpecError: The target is a number of tokens, and that of a sample is not known.
        """
        if target and target.kind == "tokens/s" and self.counted.tokens is None:
            raise SpecError(
                "command line: --target tokens/s=N needs batches whose integer tensors are [samples, length], all of one length, and those "
                "of this job are not; give --target samples/s=N"
            )
        return chosen(self.candidates, target)


def target_of(text: str) -> Target:
    """Return the target that a user has written.

    Raises:
        SpecError: It is none.
    """
    kind, _, limit = text.partition("=")
    known = get_args(TargetKind)
    with suppress(ValueError):
        if kind in known and 0 < float(limit) < math.inf:
            return Target(cast(TargetKind, kind), float(limit))
    raise SpecError(f"command line: --target {text} is not one of {', '.join(f'{each}=N' for each in known)}")


def measured_in(file: Path) -> MeasuredRates:
    """Return the rates that a file has.

    Raises:
        SpecError: It has none, or cannot be read.
    """
    try:
        return read_rates(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = one_line(error)
        raise SpecError(
            f"{file} has no measured rates ({reason}); write it with `undula doctor --measure {file}`"
        ) from error


def plan_job(
    job: Path,
    overrides: Sequence[str],
    gpus: Sequence[str],
    workers: Sequence[int],
    link: tuple[float, float],
    prices: Prices,
    changes_per_hour: float,
    script: Path | None = None,
    project: Path | None = None,
    measured: MeasuredRates | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> Planned:
    """Return the configurations in which a job could train.

    Args:
        job: YAML of the job.
        overrides: Overrides of the YAML.
        gpus: Names of kinds of GPUs.
        workers: Numbers of workers.
        link: Latency in seconds and bandwidth in bytes per second of the link between two workers.
        prices: Prices of machines.
        changes_per_hour: Number of times in an hour that a spot worker is taken.
        script: Script of the job, unless it lies beside the YAML.
        project: Folder in which packages lie that the script imports.
        measured: Rates of a worker that were measured, which then is a kind of GPU as well, with its own link.
        show: Function that is called with what is going on whenever that changes.

    Raises:
        SpecError: The job is invalid, or its script cannot be run on this machine.
    """
    given = [*overrides, *absolute_paths(load_spec(job, overrides).spec)]
    offers = [_offer(_gpu(name), prices) for name in gpus]
    if measured:
        offers.append(Offer(_measured_gpu(measured), "", None, None, measured.link))
    counted_with = partial(counted_by_script, script_of(job, script), job, project=project, show=show)
    counted = counted_with(given)
    spec = counted.spec
    most = spec.plan.virtual_workers
    if not (sensible := [count for count in workers if count <= most]):
        raise SpecError(
            f"command line: --workers has no number up to plan.virtual_workers, which is {most}; more workers have nothing to do"
        )
    if measured:
        _check_cpus(measured, spec)
    own = setting_of(spec)

    def found_with(counted: JobCount, stage: int) -> tuple[Candidate[Setting], ...]:
        workload = Workload(
            counted.state, [*_kinds(counted)], spec.plan, counted.steps, wire_of(spec), stage, counted.tokens
        )
        found = candidates(workload, offers, sensible, Link(*link), changes_per_hour, partial(_rates, measured))
        able = (each for each in found if not measured or _is_measured(each, measured))
        return tuple(each for each in able if each.setting == own or _is_sensible(each))

    found, higher, own_stage = found_with(counted, spec.sharding.stage), None, spec.sharding.stage
    if not any(each.fits for each in found):
        with suppress(SpecError):  # the model cannot be sharded
            sharded = counted if own_stage else counted_with([*given, SHARDED])
            for stage in range(3, own_stage, -1):
                if best := fastest(found_with(sharded, stage)):
                    higher = Higher(stage, best, own)
    return Planned(own, counted, found, higher)


def expected_rates(
    job: Path,
    overrides: Sequence[str],
    sizes: Sequence[int],
    is_weak: bool,
    measured: MeasuredRates,
    script: Path | None = None,
    project: Path | None = None,
) -> dict[int, float]:
    """Return the samples per second of a job that follow from measured rates, by number of workers.

    Args:
        job: YAML of the job.
        overrides: Overrides of the YAML.
        sizes: Numbers of workers.
        is_weak: Whether the plan of the job is the work of each worker, instead of all workers together.
        measured: The rates.
        script: Script of the job, unless it lies beside the YAML.
        project: Folder in which packages lie that the script imports.

    Raises:
        SpecError: The job is invalid, its script cannot be run on this machine, or its number format was not measured.
    """
    given = [*overrides, *absolute_paths(load_spec(job, overrides).spec)]
    counted = counted_by_script(script_of(job, script), job, given, project)
    spec, own = counted.spec, setting_of(counted.spec)
    _check_cpus(measured, spec)
    if own.compute not in measured.rates or not (measured.link or max(sizes) == 1):
        raise SpecError(
            f"command line: --rates has no rates for {own.compute}, or no link; measure a worker with room for a second one"
        )
    found = {}
    for workers in sizes:
        factor = workers if is_weak else 1
        plan = replace(
            spec.plan,
            virtual_workers=spec.plan.virtual_workers * factor,
            global_batch=spec.plan.global_batch * factor,
        )
        division = division_of(plan, own.samples, workers, wire_of(spec), spec.sharding.stage)
        link = measured.link or Link(0.0, math.inf)
        step = step_seconds(counted.state, counted.passes[own], division, measured.of(own.compute, workers), link)
        found[workers] = plan.global_batch / step.total
    return found


def wire_of(spec: JobSpec) -> float:
    """Return the bytes of a number in the sums of a job's gradients, relative to those in a gradient."""
    return 1.0 if spec.gradient.compression == "none" else 0.5


def keys_of(setting: Setting, own: Setting) -> dict[str, Any]:
    """Return the keys of the YAML that must change for a setting, with their new values."""
    values = {
        "precision.compute": (setting.compute, own.compute),
        "activations.keep": (setting.activations.keep, own.activations.keep),
        "activations.offload": (setting.activations.offload, own.activations.offload),
        "plan.micro_batch": (setting.samples, own.samples),
    }
    return {key: new for key, (new, before) in values.items() if new != before}


def overrides_of(setting: Setting, own: Setting) -> list[str]:
    """Return the overrides of the YAML that make a setting of the job's own."""
    return [f"{key}={str(value).lower()}" for key, value in keys_of(setting, own).items()]


def applied(job: Path, overrides: Sequence[str], candidate: Candidate[Setting], planned: Planned) -> str:
    """Return the text of a job's YAML with the overrides of the command, unless they are secrets, and a configuration.

    Its comments stay.
    """
    shown = (each.partition("=") for each in overrides if not has_secret(each))
    given = {key: yaml.safe_load(value) for key, _, value in shown}
    values = {**given, **keys_of(candidate.setting, planned.own), "workers.max": candidate.workers}
    if planned.counted.spec.workers.min > candidate.workers:
        values["workers.min"] = candidate.workers
    return with_values(job.read_text(encoding="utf-8"), values)


def _kinds(counted: JobCount) -> Iterator[Kind[Setting]]:
    """Yield the ways to compute of all sizes. fp16 takes the memory of bf16."""
    for setting, passes in passes_of(counted.passes, sizes_of(counted.spec)):
        names: list[Compute] = [setting.compute, "fp16"] if setting.compute == "bf16" else [setting.compute]
        for name in names:
            yield Kind(replace(setting, compute=name), name, passes)


def _is_sensible(candidate: Candidate[Setting]) -> bool:
    """Return whether a GPU computes faster in a format than in fp32, if the format is not fp32."""
    tflops = candidate.offer.gpu.tflops
    compute = candidate.setting.compute
    if compute == "fp16":
        return tflops["bf16"] <= tflops["fp32"]
    return compute == "fp32" or tflops[compute] > tflops["fp32"]


def _gpu(name: str) -> Gpu:
    if gpu := GPUS.get(name.upper()):
        return gpu
    raise SpecError(
        f"command line: --gpu {name} is not known; give one of {', '.join(GPUS)}, or --rates FILE with what `undula doctor --measure FILE` "
        "has measured on it"
    )


def _measured_gpu(measured: MeasuredRates) -> Gpu:
    """Return a measured device as a kind of GPU. The peak of its data sheet is not known, so that its MFU relates to the measured rate."""
    known = measured.rates
    formats: tuple[Compute, ...] = get_args(Compute)
    tflops = {compute: known.get(compute, known["fp32"]).flops_per_s / 1e12 for compute in formats}
    return Gpu(measured.device, measured.memory_bytes / GIB, tflops, known["fp32"].bytes_per_s / 1e9, {})


def _check_cpus(measured: MeasuredRates, spec: JobSpec) -> None:
    """Refuse rates of workers with another number of CPUs, which computes at another rate and is another number of workers on a node.

    Raises:
        SpecError: The rates are those of such workers.
    """
    if measured.cpus != spec.workers.cpus:
        raise SpecError(
            f"command line: --rates is about workers with {measured.cpus:g} CPUs, and workers.cpus is {spec.workers.cpus:g}; measure "
            f"with `undula doctor --measure FILE --cpus {spec.workers.cpus:g}`"
        )


def _is_measured(candidate: Candidate[Setting], measured: MeasuredRates) -> bool:
    """Return whether the rates of a configuration were measured, if it is one of the measured device."""
    return candidate.offer.gpu.title != measured.device or candidate.setting.compute in measured.rates


def _rates(measured: MeasuredRates | None, gpu: Gpu, compute: str, workers: int) -> DeviceRates:
    if measured and gpu.title == measured.device and compute in measured.rates:
        return measured.of(compute, workers)
    return rates_of(gpu, compute)


def _offer(gpu: Gpu, prices: Prices) -> Offer:
    """Return the cheapest way to rent a GPU."""
    found = []
    for machine, count in gpu.machines.items():
        quotes = [prices.quote(Machine(machine, market), market) for market in (ON_DEMAND, SPOT)]
        on_demand, spot = (None if quote is None else quote.hourly / count for quote in quotes)
        found.append(Offer(gpu, machine, on_demand, spot))
    return min(found, key=lambda offer: float("inf") if offer.hourly is None else offer.hourly)
