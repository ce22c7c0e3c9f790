"""Scripts of other libraries as runs in processes of the test, without Ray."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from numbers_job import cpu_run

from undula.adapters.script import Script, ScriptConfig
from undula.config.job import load_spec
from undula.driver.preflight import check_job, examine
from undula.driver.record import job_of
from undula.recovery.worker_state import LeaveGroup, WorkerState
from undula.state.ledger import read_ledger
from undula.storage import Store, open_store
from undula.train.job import Job
from undula.train.single_process import SingleProcess, local_world

Main = Callable[[], object]


def job_of_script(main: Main, folder: Path, *overrides: str, virtual_workers: int = 1) -> Job:
    """Return the job that the driver makes of a script, after its checks."""
    file = folder / "job.yaml"
    file.write_text(f"{{name: run, runs: {folder / 'runs'}, plan: {{virtual_workers: {virtual_workers}}}}}")
    script = Script(main)
    loaded = load_spec(file, overrides, ScriptConfig, settings=script.settings)
    examined = examine(script, loaded, check_job(loaded))
    return job_of(loaded, token_hex(8), script_data=examined.script_data)


def train_here(main: Main, folder: Path, *overrides: str, virtual_workers: int = 1) -> Job:
    """Train a script on one rank in this process."""
    job = job_of_script(main, folder, *overrides, virtual_workers=virtual_workers)
    SingleProcess(Script(main), job, lambda message: None)()
    return job


def train_group(main: Main, job: Job, worker: WorkerState | None = None) -> None:
    """Train in a group of one rank, which can end early and leave its state in the worker."""
    worker = worker or WorkerState()
    with local_world(torch.device("cpu")):
        worker.join_group()
        run = cpu_run(job, worker=worker)
        try:
            Script(main)(run)
        except (OSError, LeaveGroup):
            run.hand_over()
        finally:
            run.free()


def renamed(job: Job, name: str) -> Job:
    """Return the same job under another name, and so with another run directory."""
    url = f"{job.run_url.rpartition('/')[0]}/{name}"
    return replace(job, name=name, run_url=url, run_id=token_hex(8))


def store_of(job: Job) -> Store:
    return open_store(job.run_url)


def columns(job: Job, *names: str) -> list[list[Any]]:
    """Return columns of a run's ledger."""
    steps = read_ledger(store_of(job)).steps
    return [steps[name].to_pylist() for name in names]


def changed_lines(before: Sequence[str], after: Sequence[str]) -> tuple[int, int]:
    """Return how many lines that are not empty a change of a script takes out, and how many it adds."""
    signs = [line[0] for line in difflib.ndiff(before, after) if line[2:].strip()]
    return signs.count("-"), signs.count("+")
