"""A job as `undula chaos` runs it: under a name of its own, on a cluster of nodes with room for one worker each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from undula.cluster.room import refuse_what_never_fits
from undula.config.job import JobSpec, absolute_paths, load_spec, script_of
from undula.storage import Store, open_store
from undula.testing.study import script_command

NODE_CPUS = 1
"""Number of CPUs of a node, as `Nodes.add` has it."""
Baseline = Literal["ray"]
_AS_RAY = ("checkpoint.every_steps=10", "checkpoint.snapshot_every_steps=0")
"""Overrides for Ray Train's own trainer, which has checkpoints alone."""


@dataclass(frozen=True)
class ChaosJob:
    """A job, ready to run under faults."""

    spec: JobSpec
    store: Store
    """Run directory."""
    command: Sequence[str]
    """Command of the job's script."""
    folder: Path
    """Working directory of the script."""


def load_chaos_job(file: Path, overrides: Sequence[str], script: Path | None, baseline: Baseline | None) -> ChaosJob:
    """A job with the settings that chaos gives it. Its name ends in -chaos, so that it never replaces the run of the job itself.

    Args:
        file: YAML of the job.
        overrides: Overrides of the YAML.
        script: Script of the job. By default it lies beside the YAML and has its name.
        baseline: Trainer to compare with, in place of Undula's.

    Raises:
        SpecError: the job is wrong, has no script, or asks for workers that fit on no node.
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
