"""Count of a job's memory and computation: in the process of its script, and as the request of a command to such a process."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from undula.config.job import JobSpec, LoadedSpec
from undula.data.stored.mixture import Mixture, StoredData
from undula.data.stored.reads import WindowReads
from undula.driver.count_process import Told, received, send, show_progress
from undula.driver.preflight import check_job, examine
from undula.driver.print_job import failure_of, run_for_output
from undula.driver.record import job_of
from undula.errors import SpecError
from undula.parallel.spec import ActivationsSpec
from undula.plan.host_memory import NO_DATA, DataCount
from undula.plan.memory import PassCount, StateCount, extrapolated
from undula.plan.plan import Plan
from undula.plan.precision import Compute
from undula.train.dry_run.count import count
from undula.train.dry_run.counting import PROGRESS, Setting
from undula.train.run import Run

_OTHERWISE = {
    "engine": "torch",
    "gradient.reduce": "average",
    "plan.batch": "fixed",
    "compile": "false",
}
"""Values that are modelled, of the settings of which others are not."""
KEEPS = ("all", "selective", "sqrt", "none")
"""Policies for activations that are compared."""
MOST_SIZES = 5
"""Maximum number of sizes of micro-batches that are compared, from the largest one on and from the job's own one on."""
MIB = 2**20


@dataclass(frozen=True)
class JobCount:
    """What the script of a job has counted."""

    spec: JobSpec
    """The job with the settings that its script gives. Secrets are hidden."""
    state: StateCount
    passes: Mapping[Setting, PassCount]
    is_fake: bool
    """Whether the steps had no values. Otherwise they were real ones of a few samples on the CPU, from which larger ones follow."""
    steps: int
    """Number of steps of the plan."""
    tokens: int | None
    """Number of tokens of each sample; None if it is not known."""
    data: DataCount = NO_DATA
    """What a worker needs on its host to read the data."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Error of each setting that the model cannot have, by its override."""


def print_count(loaded: LoadedSpec, train: Callable[[Run], None]) -> None:
    """Count a job, and send the result to `counted_by_script`.

    Args:
        loaded: The job.
        train: Train function of the script.

    Raises:
        UndulaError: The job is invalid, or has a setting that is not modelled.
    """
    _refuse_uncounted(loaded.spec)
    stored = check_job(loaded)
    examined = examine(train, loaded, stored)
    job = job_of(loaded, "", script_data=examined.script_data)
    PROGRESS.setLevel(logging.DEBUG)
    PROGRESS.addHandler(Told())
    counted = count(train, job, _asked(loaded.spec))
    spec = TypeAdapter(JobSpec).validate_python({**loaded.tree(), "config": {}})
    data = data_count(stored, examined.plan, loaded.spec) if stored else counted.data
    steps = examined.plan.total_steps
    send(JobCount(spec, counted.state, counted.passes, counted.is_fake, steps, counted.tokens, data, counted.left_out))


def counted_by_script(
    script: Path,
    job: Path,
    overrides: Sequence[str],
    project: Path | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> JobCount:
    """Let the script of a job count it, in a process of its own. `show` is called with what the process does.

    Raises:
        SpecError: The job is invalid, or the script cannot be run on this machine.
    """
    show(f"running {script.name} up to its steps ...")
    done = run_for_output(script, job, ["--count"], overrides, project, partial(show_progress, show))
    counted: JobCount | None = received(done.stdout)
    if done.returncode or counted is None:
        raise failure_of(done, f"{script} cannot be counted, because it failed")
    return counted


def data_count(data: StoredData, plan: Plan, spec: JobSpec) -> DataCount:
    """Return what a worker needs on its host to read stored data, without what a transform of the script adds.

    Args:
        data: The data.
        plan: Plan of the run.
        spec: The job.
    """
    window = whole = 0
    for manifest in data.manifests if isinstance(data, Mixture) else (data,):
        reads = WindowReads(manifest, manifest.select(spec.data.columns))
        sizes = [reads.decoded_bytes(group, int(rows)) for group, rows in enumerate(manifest.row_counts)]
        window += sum(sorted(sizes)[-spec.plan.window if spec.plan.shuffle == "window" else -1 :])
        whole += sum(sizes)
    read = whole * plan.total_samples // data.num_rows
    has_tasks = read > spec.data.head_mib * MIB  # otherwise the worker reads everything itself
    return DataCount(window, min(spec.data.prefetch_mib * MIB, read), spec.data.read_tasks if has_tasks else 0)


def _refuse_uncounted(spec: JobSpec) -> None:
    """Refuse jobs whose steps hold other memory, or take other time, than what is modelled.

    Raises:
        SpecError: The job has such a setting.
    """
    for setting in uncounted(spec):
        key = setting.partition("=")[0]
        raise SpecError(
            f"{setting} is not part of what `undula plan` counts; override it, such as {key}={_OTHERWISE[key]}, to see the job without it"
        )


def uncounted(spec: JobSpec) -> list[str]:
    """Return the settings of a job that are not modelled."""
    settings = {
        f"engine={spec.engine}": spec.engine != "torch",
        "gradient.reduce=adasum": spec.gradient.reduce == "adasum",
        "plan.batch=elastic": spec.plan.batch == "elastic",
        "compile=true": spec.compile,
    }
    return [setting for setting, is_set in settings.items() if is_set]


def setting_of(spec: JobSpec) -> Setting:
    """Return the setting of a job's YAML."""
    share = spec.plan.global_batch // spec.plan.virtual_workers
    return Setting(spec.precision.compute, spec.activations, min(spec.plan.micro_batch or share, share))


def sizes_of(spec: JobSpec) -> list[int]:
    """Return sizes of micro-batches in ascending order.

    These are the share of a virtual worker, its half and so on, and the job's own, its double and so on.
    """
    share, own = spec.plan.global_batch // spec.plan.virtual_workers, setting_of(spec).samples
    halved = [-(-share // 2**times) for times in range(MOST_SIZES)]
    return sorted({*halved, own, *(own * 2**times for times in range(MOST_SIZES) if own * 2**times < share)})


def _asked(spec: JobSpec) -> list[Setting]:
    """Return the settings that are counted, the job's own first."""
    own, sizes = setting_of(spec), sizes_of(spec)
    few = sorted({sizes[0], sizes[-1], own.samples})
    computes: list[Compute] = list(dict.fromkeys([spec.precision.compute, "bf16"]))
    if spec.precision.compute == "fp16":
        computes = ["fp16"]
    kept = [replace(spec.activations, keep=keep, offload=False) for keep in KEEPS if keep != "all"]
    policies = [spec.activations, ActivationsSpec(), *kept]
    every = [Setting(compute, policy, size) for compute in computes for policy in policies for size in few]
    return [*dict.fromkeys([own, *every])]


def passes_of(counted: Mapping[Setting, PassCount], sizes: Sequence[int]) -> Iterator[tuple[Setting, PassCount]]:
    """Yield the passes of micro-batches of all sizes, for each way to compute, from the counts of a few."""
    for compute, policy in dict.fromkeys((each.compute, each.activations) for each in counted):
        known = {
            setting.samples: passes
            for setting, passes in counted.items()
            if (setting.compute, setting.activations) == (compute, policy)
        }
        low, high = known[min(known)], known[max(known)]
        for size in sizes:
            passes = known.get(size) or (low if low is high else extrapolated(low, high, size))
            yield Setting(compute, policy, size), replace(passes, samples=size)
