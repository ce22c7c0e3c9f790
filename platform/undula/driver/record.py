"""Record of a job in its run directory, and the parameters of its training that follow from it."""

import json
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from undula.config.job import LoadedSpec, changed_key
from undula.data.planned import Data
from undula.data.script.indexed import ScriptData
from undula.data.stored.mixture import load_data
from undula.elastic.pure.fleet import Work
from undula.elastic.pure.spec import WorkersSpec
from undula.plan.plan import Plan
from undula.state.directory import JOB_FILE, identity, job_record
from undula.storage import Store
from undula.train.job import Job


@dataclass(frozen=True)
class LaunchSpec:
    """Parameters of one training for its trainer."""

    job: Job
    workers: WorkersSpec
    engine_settings: Any
    """Section of the job that has the name of its engine, such as `horovod`; None if there is none."""
    work: Work
    """Number of steps and start time of the run, from which the fleet policy computes whether the run will meet its deadline."""


def record_job(loaded: LoadedSpec, plan: Plan, store: Store, script_data: ScriptData | None = None) -> LaunchSpec:
    """Write the job's record, `job.json`, to its run directory.

    A run that resumes keeps its id and its start time. A job with other data or other logical settings is a new run, which must not
    find the snapshots of the previous one. Each submission has a name of its own in the record, so that workers of an earlier one end.

    Args:
        loaded: The job.
        plan: Plan of the run.
        store: Run directory.
        script_data: Data that the script gives to the run; None if the job's YAML names the data.

    Returns:
        Parameters of the training for `launch`.
    """
    spec, before, description = loaded.spec, job_record(store), _description(loaded, plan, script_data)
    is_same = before.get("manifest_digest") == description["manifest_digest"] and not changed_key(
        before.get("spec", {}), description["spec"]
    )
    run, submission = identity(before if is_same else {}), token_hex(8)
    store.write(JOB_FILE, json.dumps({**description, **run, "submission": submission}, indent=1).encode())
    return LaunchSpec(
        job=job_of(loaded, run["id"], submission, script_data),
        workers=spec.workers,
        engine_settings=getattr(spec, spec.engine, None),
        work=Work(plan.total_steps, run["began"]),
    )


def job_of(loaded: LoadedSpec, run_id: str, submission: str = "", script_data: ScriptData | None = None) -> Job:
    """Return the part of a job's spec that its workers need."""
    return Job.of(
        loaded.spec,
        run_url=loaded.spec.run_url,
        config=loaded.config,
        run_id=run_id,
        submission=submission,
        script_data=script_data,
    )


def _description(loaded: LoadedSpec, plan: Plan, script_data: ScriptData | None) -> dict[str, Any]:
    """Return the part of the record that follows from the spec and the data."""
    data: Data = script_data.training if script_data else load_data(loaded.spec.data)
    return {
        "name": loaded.spec.name,
        "plan_digest": plan.digest(data.digest, loaded.spec.precision),
        "manifest_digest": data.digest,
        "total_steps": plan.total_steps,
        "total_samples": plan.total_samples,
        "train_rows": data.num_rows,
        "spec": loaded.tree(),
        **({"dataset": script_data.as_record()} if script_data else {}),
    }
