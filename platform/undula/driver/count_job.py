"""Count of a job's memory and computation: in the process of its script, and as the request of a command to such a process."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from undula.config.job import JobSpec, LoadedSpec
from undula.data.stored.mixture import Mixture, StoredData
from undula.data.stored.reads import WindowReads
from undula.driver.preflight import check_job, examine
from undula.driver.print_job import failure_of, run_for_output
from undula.driver.record import job_of
from undula.errors import SpecError
from undula.parallel.spec import ActivationsSpec
from undula.plan.host_memory import NO_DATA, DataCount
from undula.plan.memory import PassCount, StateCount
from undula.plan.plan import Plan
from undula.plan.precision import Compute
from undula.train.dry_run.count import count
from undula.train.dry_run.counting import Setting
from undula.train.run import Run

_OTHERWISE = {
    "engine=horovod": "engine=torch",
    "gradient.reduce=adasum": "gradient.reduce=average",
    "plan.batch=elastic": "plan.batch=fixed",
    "compile=true": "compile=false",
}
"""Overrides without the settings that are not modelled."""
KEEPS = ("all", "selective", "sqrt", "none")
"""Policies for activations that are compared."""
MOST_SIZES = 5
"""Maximum number of sizes of micro-batches that are compared, from the largest one on and from the job's own one on."""
MIB = 2**20
MARK = "undula count: "
"""Beginning of the line of a script's output that has the result."""


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


def print_count(loaded: LoadedSpec, train: Callable[[Run], None]) -> None:
    """Count a job, and print the result as a line of JSON.

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
    counted = count(train, job, _asked(loaded.spec))
    result = {
        "spec": loaded.tree(),
        "state": asdict(counted.state),
        "passes": [[asdict(setting), asdict(passes)] for setting, passes in counted.passes.items()],
        "is_fake": counted.is_fake,
        "steps": examined.plan.total_steps,
        "tokens": counted.tokens,
        "data": asdict(data_count(stored, examined.plan, loaded.spec) if stored else counted.data),
    }
    print(f"{MARK}{json.dumps(result)}", flush=True)


def counted_by_script(script: Path, job: Path, overrides: Sequence[str], project: Path | None = None) -> JobCount:
    """Let the script of a job count it, in a process of its own.

    Raises:
        SpecError: The job is invalid, or the script cannot be run on this machine.
    """
    done = run_for_output(script, job, ["--count"], overrides, project)
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith(MARK)), None)
    if done.returncode or line is None:
        raise failure_of(done, f"{script} cannot be counted, because it failed")
    result = json.loads(line.removeprefix(MARK))
    return JobCount(
        TypeAdapter(JobSpec).validate_python({**result["spec"], "config": {}}),
        StateCount(**result["state"]),
        {_setting(setting): PassCount(**passes) for setting, passes in result["passes"]},
        result["is_fake"],
        result["steps"],
        result["tokens"],
        DataCount(**result["data"]),
    )


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
        raise SpecError(
            f"{setting} is not part of what `undula plan` counts; override it, such as {_OTHERWISE[setting]}, to see the job without it"
        )


def uncounted(spec: JobSpec) -> list[str]:
    """Return the settings of a job that are not modelled."""
    settings = {
        "engine=horovod": spec.engine == "horovod",
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


def _setting(tree: Mapping[str, Any]) -> Setting:
    units = tree["activations"]["units"]
    given = {**tree["activations"], "units": units if isinstance(units, str) else tuple(units)}
    return Setting(tree["compute"], ActivationsSpec(**given), tree["samples"])
