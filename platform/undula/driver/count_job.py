"""Count of a job's memory and computation by its script, and the request for it by a command that does not run scripts itself."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from undula.config.environment import OVERRIDES, without_secrets
from undula.config.job import LoadedSpec
from undula.driver.preflight import check_job, examine
from undula.driver.project import importable, project_modules
from undula.driver.record import job_of
from undula.errors import SpecError
from undula.parallel.spec import ActivationsSpec
from undula.plan.memory import PassCount, StateCount
from undula.train.dry_run.count import count
from undula.train.dry_run.counting import Setting
from undula.train.run import Run

MARK = "undula count: "
"""Beginning of the line with the result, among those that the script prints."""


@dataclass(frozen=True)
class JobCount:
    """What the script of a job has counted."""

    state: StateCount
    passes: Mapping[Setting, PassCount]
    is_fake: bool
    """Whether the steps had no values. Otherwise they were real ones of a few samples on the CPU, from which larger ones follow."""
    steps: int
    """Number of steps of the plan."""


def print_count(loaded: LoadedSpec, train: Callable[[Run], None], asked: str) -> None:
    """Count a job, and print the result as a line of JSON.

    Args:
        loaded: The job.
        train: Train function of the script.
        asked: Settings that are counted, as JSON.

    Raises:
        UndulaError: The job is invalid.
    """
    examined = examine(train, loaded, check_job(loaded))
    job = job_of(loaded, "", script_data=examined.script_data)
    counted = count(train, job, [_setting(each) for each in json.loads(asked)])
    result = {
        "state": asdict(counted.state),
        "passes": [[asdict(setting), asdict(passes)] for setting, passes in counted.passes.items()],
        "is_fake": counted.is_fake,
        "steps": examined.plan.total_steps,
    }
    print(f"{MARK}{json.dumps(result)}", flush=True)


def counted_by_script(
    script: Path, job: Path, overrides: Sequence[str], settings: Sequence[Setting], project: Path | None = None
) -> JobCount:
    """Let the script of a job count some settings, in a process of its own.

    Raises:
        SpecError: The job is invalid, or the script cannot be run on this machine.
    """
    shown, private = without_secrets(overrides)
    asked = json.dumps([asdict(setting) for setting in settings])
    file = str(job.absolute())  # the driver goes to the folder of the script
    command = [sys.executable, "-m", "undula.driver", str(script), "--config", file, "--count", asked, *shown]
    with importable(project_modules(script, project)) as path:
        env = {**os.environ, **path, OVERRIDES: private.get(OVERRIDES, "[]"), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith(MARK)), None)
    if done.returncode or line is None:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        if last.startswith("undula: "):
            raise SpecError(last.removeprefix("undula: "))
        raise SpecError(f"{script} cannot be counted, because it failed: {last}")
    result = json.loads(line.removeprefix(MARK))
    return JobCount(
        StateCount(**result["state"]),
        {_setting(setting): PassCount(**passes) for setting, passes in result["passes"]},
        result["is_fake"],
        result["steps"],
    )


def _setting(tree: Mapping[str, Any]) -> Setting:
    units = tree["activations"]["units"]
    given = {**tree["activations"], "units": units if isinstance(units, str) else tuple(units)}
    return Setting(tree["compute"], ActivationsSpec(**given), tree["samples"])
