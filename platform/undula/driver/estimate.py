"""Estimate of what a worker needs on the GPUs of a cluster, made before any worker starts there."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from undula.config.job import JobSpec, LoadedSpec
from undula.data.script.indexed import ScriptData
from undula.driver.count_job import KEEPS, passes_of, setting_of, sizes_of, uncounted
from undula.driver.count_process import LIMIT_S, counting
from undula.driver.plan_job import overrides_of, wire_of
from undula.driver.record import job_of
from undula.elastic.ray.gpu_memory import NodeGpu, smallest_gpu
from undula.errors import SpecError
from undula.parallel.spec import ActivationsSpec
from undula.plan.candidates import ASSUMED_LINK, rates_of
from undula.plan.gpus import CONTEXT_BYTES, ESTIMATE_ERROR, MARGIN, known_gpu
from undula.plan.memory import Division, PassCount, StateCount, division_of
from undula.plan.step_memory import moments, peak
from undula.plan.step_time import step_seconds
from undula.state.events import EstimateEvent
from undula.train.dry_run.counting import Count, Setting
from undula.train.job import Job
from undula.train.script_file import ScriptFile

MOST_SIZES = 16
"""Maximum number of numbers of workers for which a step is estimated."""
REFUSAL_S = 60.0
"""Maximum seconds for the count of other settings, which a refusal may name."""
LATE = (
    f"the memory of a step is not checked, because the script takes more than {LIMIT_S:.0f} s up to its first step; set "
    "workers.check_memory=false, so that the start does not wait for it"
)


@contextmanager
def estimating(loaded: LoadedSpec, script_data: ScriptData | None) -> Iterator[Callable[[], EstimateEvent | None]]:
    """Count a step of a job during a block, if its workers have GPUs of their own and execute a script.

    Args:
        loaded: The job, with numbers in place of the values that depend on the machines.
        script_data: Data that the script gives to the run; None if the job's YAML names the data.

    Yields:
        Function that returns what a worker needs on the smallest GPU of the cluster; None if nothing is known. It raises a SpecError if a
        step does not fit into its memory, which names the nearest settings that do, if there are any.
    """
    spec = loaded.spec
    is_wanted = spec.workers.check_memory and spec.workers.per_worker.get("GPU", 0) >= 1 and not uncounted(spec)
    # A train function without a script is sent to the workers as it is.
    script = ScriptFile.of_this_process() if is_wanted else None
    if script is None:
        yield lambda: None
        return
    job = job_of(loaded, "", script_data=script_data)
    with counting(script, job, [setting_of(spec)], if_late=LATE) as result:
        yield lambda: _estimate(spec, script, job, result)


def _estimate(spec: JobSpec, script: ScriptFile, job: Job, result: Callable[[], Count | None]) -> EstimateEvent | None:
    own = setting_of(spec)
    gpu = smallest_gpu(spec.workers.per_worker)
    if gpu is None or (counted := result()) is None:
        return None
    allocated = _most_bytes(counted.state, counted.passes[own], spec)
    # The script may hold other tensors on the host, and offloaded activations wait there.
    surely = _most_bytes(replace(counted.state, other_bytes=0), counted.passes[own], spec)
    is_too_much = surely * (1 - ESTIMATE_ERROR) + CONTEXT_BYTES > gpu.memory_bytes
    if is_too_much and not counted.may_need_less and not spec.activations.offload:
        raise SpecError(_refusal(spec, script, job, counted, gpu))
    known, times = known_gpu(gpu.kind, gpu.memory_bytes), {}
    if known:
        rates = rates_of(known, own.compute)
        for workers in _sizes(spec):
            division = _division(spec, own.samples, workers)
            step = step_seconds(counted.state, counted.passes[own], division, rates, ASSUMED_LINK)
            times[str(workers)] = step.total
    name = known.title if known else gpu.kind or "the GPU"
    return EstimateEvent(name, allocated, _needed(allocated), gpu.memory_bytes, times, step=None)


def _sizes(spec: JobSpec) -> list[int]:
    """Return numbers of workers with which the job may train: the fewest, twice as many, and so on, and the most."""
    most = min(spec.workers.max, spec.plan.virtual_workers)
    doubled = [spec.workers.min * 2**times for times in range(MOST_SIZES)]
    return sorted({min(size, most) for size in doubled})


def _most_bytes(state: StateCount, passes: PassCount, spec: JobSpec) -> float:
    """Return the most memory that tensors take in a step with any number of workers."""
    divisions = (_division(spec, passes.samples, workers) for workers in _sizes(spec))
    return max(peak(moments(state, passes, division)).total for division in divisions)


def _division(spec: JobSpec, samples: int, workers: int) -> Division:
    return division_of(spec.plan, samples, workers, wire_of(spec), spec.sharding.stage)


def _needed(allocated: float) -> float:
    return allocated * (1 + MARGIN) + CONTEXT_BYTES


def _more_workers(spec: JobSpec, counted: Count, gpu: NodeGpu) -> tuple[int, float] | None:
    """Return the fewest workers among which a sharded model fits, and what each of them needs; None if it fits with no number of them."""
    passes = counted.passes[setting_of(spec)]

    def needed(workers: int) -> float:
        fewest = replace(spec, workers=replace(spec.workers, min=workers))
        return _needed(_most_bytes(counted.state, passes, fewest))

    more = range(spec.workers.min + 1, _sizes(spec)[-1] + 1) if spec.sharding.stage else range(0)
    place = bisect_left(more, True, key=lambda workers: needed(workers) <= gpu.memory_bytes)
    return (more[place], needed(more[place])) if place < len(more) else None


def _refusal(spec: JobSpec, script: ScriptFile, job: Job, own_count: Count, gpu: NodeGpu) -> str:
    allocated = _most_bytes(own_count.state, own_count.passes[setting_of(spec)], spec)
    needs, has = (f"{size / 2**30:.1f} GiB" for size in (_needed(allocated), gpu.memory_bytes))
    text = f"a step needs about {needs} of GPU memory, but the cluster's {gpu.kind or 'smallest GPU'} has {has}"
    anyway = "or workers.check_memory=false to train without this check"
    if more := _more_workers(spec, own_count, gpu):
        workers, needed = more
        return f"{text} with workers.min={spec.workers.min}; set workers.min={workers}, which needs {needed / 2**30:.1f} GiB, {anyway}"
    own = setting_of(spec)
    policies = dict.fromkeys([own.activations, *(ActivationsSpec(keep=keep) for keep in KEEPS)])
    sizes = [size for size in sizes_of(spec) if size <= own.samples]
    asked = [Setting(own.compute, policy, size) for policy in policies for size in (own.samples, sizes[0])]
    with counting(script, job, asked, REFUSAL_S) as result:
        counted = result()
    if counted is None:
        return f"{text}; lower plan.micro_batch, use GPUs with more memory, {anyway}"
    fitting = [
        (len(changes), passes.work.flops / passes.samples, -setting.samples, " ".join(changes), needed)
        for setting, passes in passes_of(counted.passes, sizes)
        if (needed := _needed(_most_bytes(counted.state, passes, spec))) <= gpu.memory_bytes
        for changes in [overrides_of(setting, own)]
    ]
    if not fitting:
        stage = spec.sharding.stage
        sharding = "" if stage == 3 or spec.workers.max == 1 else f"set sharding.stage={stage + 1} or higher, "
        return f"{text}, and neither activations.keep nor plan.micro_batch helps enough; {sharding}use GPUs with more memory, {anyway}"
    # The nearest setting by its changes, its operations, and last the size of its micro-batch.
    *_, changes, needed = min(fitting)
    return f"{text}; set {changes}, which needs {needed / 2**30:.1f} GiB, {anyway}"
