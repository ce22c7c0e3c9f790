"""Estimate of what a worker needs on the GPUs of a cluster, made before any worker starts there."""

import logging
from collections.abc import Callable, Iterator, Sequence

from undula.config.job import JobSpec, LoadedSpec
from undula.data.script.indexed import ScriptData
from undula.driver.count_job import KEEPS, setting_of, sizes_of, uncounted
from undula.driver.model_facts import without_breakpoints
from undula.driver.plan_job import overrides_of, wire_of
from undula.driver.record import job_of
from undula.elastic.ray.gpu_memory import NodeGpu
from undula.errors import SpecError
from undula.parallel.spec import ActivationsSpec
from undula.plan.candidates import ASSUMED_LINK, rates_of
from undula.plan.gpus import CONTEXT_BYTES, ESTIMATE_ERROR, MARGIN, known_gpu
from undula.plan.memory import Division, PassCount, StateCount, extrapolated, moments, peak
from undula.plan.step_time import step_seconds
from undula.state.events import EstimateEvent
from undula.train.dry_run.count import count
from undula.train.dry_run.counting import Count, Setting
from undula.train.run import Run

MOST_SIZES = 16
"""Maximum number of numbers of workers for which a step is estimated."""


def estimate(
    train: Callable[[Run], None], loaded: LoadedSpec, script_data: ScriptData | None, gpu: NodeGpu
) -> EstimateEvent | None:
    """Return what a worker needs on the smallest GPU of a cluster; None if the job cannot be counted without values of tensors.

    Args:
        train: Train function of the script.
        loaded: The job.
        script_data: Data that the script gives to the run; None if the job's YAML names the data.
        gpu: The GPU.

    Raises:
        SpecError: A step does not fit into its memory. The message names the nearest settings that do, if there are any.
    """
    own = setting_of(loaded.spec)
    if uncounted(loaded.spec) or (counted := _counted(train, loaded, script_data, [own])) is None:
        return None
    allocated = _most_bytes(counted.state, counted.passes[own], loaded)
    if allocated * (1 - ESTIMATE_ERROR) + CONTEXT_BYTES > gpu.memory_bytes:
        raise SpecError(_refusal(train, loaded, script_data, allocated, gpu))
    known, times = known_gpu(gpu.kind, gpu.memory_bytes), {}
    if known:
        rates = rates_of(known, own.compute)
        for workers in _sizes(loaded):
            division = _division(loaded.spec, own.samples, workers)
            step = step_seconds(counted.state, counted.passes[own], division, rates, ASSUMED_LINK)
            times[str(workers)] = step.total
    name = known.title if known else gpu.kind or "the GPU"
    return EstimateEvent(name, allocated, _needed(allocated), gpu.memory_bytes, times, step=None)


def _counted(
    train: Callable[[Run], None], loaded: LoadedSpec, script_data: ScriptData | None, settings: Sequence[Setting]
) -> Count | None:
    try:
        with without_breakpoints():
            return count(train, job_of(loaded, "", script_data=script_data), settings, may_be_real=False)
    except (Exception, SystemExit) as error:
        # The script may need values or a GPU, which the driver does not have, or it has a part that is not modelled.
        logging.getLogger("undula").info("the memory of a step is not known in advance: %s", error)
        return None


def _sizes(loaded: LoadedSpec) -> list[int]:
    """Return numbers of workers with which the job may train: the fewest, twice as many, and so on, and the most."""
    spec = loaded.spec
    most = min(spec.workers.max, spec.plan.virtual_workers)
    doubled = [spec.workers.min * 2**times for times in range(MOST_SIZES)]
    return sorted({min(size, most) for size in doubled})


def _division(spec: JobSpec, samples: int, workers: int) -> Division:
    share = spec.plan.global_batch // spec.plan.virtual_workers
    return Division(spec.plan.virtual_workers, -(-share // samples), workers, wire_of(spec))


def _most_bytes(state: StateCount, passes: PassCount, loaded: LoadedSpec) -> float:
    """Return the most memory that tensors take in a step with any number of workers."""
    divisions = (_division(loaded.spec, passes.samples, workers) for workers in _sizes(loaded))
    return max(peak(moments(state, passes, division)).total for division in divisions)


def _needed(allocated: float) -> float:
    return allocated * (1 + MARGIN) + CONTEXT_BYTES


def _refusal(
    train: Callable[[Run], None], loaded: LoadedSpec, script_data: ScriptData | None, allocated: float, gpu: NodeGpu
) -> str:
    needs, has = (f"{size / 2**30:.1f} GiB" for size in (_needed(allocated), gpu.memory_bytes))
    text = f"a step needs about {needs} of GPU memory, but the cluster's {gpu.kind or 'smallest GPU'} has {has}"
    own = setting_of(loaded.spec)
    policies = list(dict.fromkeys([own.activations, *(ActivationsSpec(keep=keep) for keep in KEEPS)]))
    sizes = [size for size in sizes_of(loaded.spec) if size <= own.samples]
    asked = [Setting(own.compute, policy, size) for policy in policies for size in (own.samples, sizes[0])]
    every = _counted(train, loaded, script_data, asked)
    fitting = [*_that_fit(loaded, every, sizes, gpu)] if every else []
    if not fitting:
        return f"{text}, and neither activations.keep nor plan.micro_batch helps enough; use GPUs with more memory"
    setting, _, needed = min(fitting, key=lambda each: _distance(each[0], each[1], own))
    changes = " ".join(overrides_of(setting, own))
    return f"{text}; set {changes}, which needs {needed / 2**30:.1f} GiB"


def _distance(setting: Setting, passes: PassCount, own: Setting) -> tuple[int, float, int]:
    """Return how far a setting is from the job's own: by its changes, its operations, and last the size of its micro-batch."""
    return len(overrides_of(setting, own)), passes.work.flops / passes.samples, -setting.samples


def _that_fit(
    loaded: LoadedSpec, every: Count, sizes: Sequence[int], gpu: NodeGpu
) -> Iterator[tuple[Setting, PassCount, float]]:
    """Yield settings that fit, with their counts and the bytes that they need."""
    by_policy: dict[ActivationsSpec, list[PassCount]] = {}
    for setting, passes in every.passes.items():
        by_policy.setdefault(setting.activations, []).append(passes)
    for policy, known in by_policy.items():
        for size in sizes:
            passes = known[0] if size == known[0].samples else extrapolated(known[-1], known[0], size)
            needed = _needed(_most_bytes(every.state, passes, loaded))
            if needed <= gpu.memory_bytes:
                yield Setting(setting_of(loaded.spec).compute, policy, size), passes, needed
