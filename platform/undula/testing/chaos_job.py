"""Job of `undula chaos`: it has a name of its own and runs on nodes that fit one worker each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from undula.cluster.room import refuse_what_never_fits
from undula.config.job import JobSpec, absolute_paths, load_spec, script_of
from undula.storage import Store, open_store
from undula.testing.scenario import script_command

NODE_CPUS = 1
"""Number of CPUs of a node, the default of `Nodes.add`."""
Baseline = Literal["ray"]
_AS_RAY = ("checkpoint.every_steps=10", "checkpoint.snapshot_every_steps=0")
"""Overrides for Ray Train's own trainer, which has checkpoints but no snapshots."""


@dataclass(frozen=True)
class ChaosJob:
    """Job that is ready to run under faults."""

    spec: JobSpec
    store: Store
    """Run directory."""
    command: Sequence[str]
    """Command of the job's script."""
    folder: Path
    """Working directory of the script."""


def load_chaos_job(file: Path, overrides: Sequence[str], script: Path | None, baseline: Baseline | None) -> ChaosJob:
    """Load a job with the settings of `undula chaos`. Its name ends in -chaos, so that it never replaces a run of the job itself.

    Args:
        file: YAML file of the job.
        overrides: Overrides of the YAML.
        script: Script of the job; by default the file beside the YAML with the same name.
        baseline: Trainer to compare with, instead of Undula's.

    Raises:
        SpecError: The job is invalid, has no script, or its workers do not fit on a node.
    """
    loaded = load_spec(file, overrides)
    script = script_of(file, script)
    refuse_what_never_fits(
        loaded.spec.workers, loaded.origins, NODE_CPUS, num_workers=1, node="each node of `undula chaos`", fix=""
    )
    name = "-".join([loaded.spec.name, "chaos", *([baseline] if baseline else [])])
    all_overrides = [*overrides, *absolute_paths(loaded.spec), *(_AS_RAY if baseline else ()), f"name={name}"]
    spec = load_spec(file, all_overrides).spec
    command = script_command(script, str(file.absolute()), all_overrides, baseline or "undula")
    return ChaosJob(spec, open_store(spec.run_url), command, script.parent)
