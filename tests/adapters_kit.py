"""Scripts of other libraries as runs in processes of the test, without Ray."""

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from ranks import forks

from undula.adapters.script import Script
from undula.config.job import load_spec
from undula.driver.launch import job_of, record_job
from undula.driver.preflight import check_job, examine
from undula.state.ledger import read_ledger
from undula.storage import Store, open_store
from undula.train.job import Job
from undula.train.single_process import SingleProcess

LIMIT_S = 300.0
Main = Callable[[], object]


def job_of_script(main: Main, folder: Path, *overrides: str, virtual_workers: int = 1) -> Job:
    """Return the job that the driver makes of a script, after its checks."""
    file = folder / "job.yaml"
    file.write_text(f"{{name: run, runs: {folder / 'runs'}, plan: {{virtual_workers: {virtual_workers}}}}}")
    script = Script(main)
    loaded = load_spec(file, overrides, settings=script.settings)
    examined = examine(script, loaded, check_job(loaded))
    return job_of(loaded, token_hex(8), script_data=examined.script_data)


def train_here(main: Main, folder: Path, *overrides: str, virtual_workers: int = 1) -> Job:
    """Train a script on one rank in this process."""
    job = job_of_script(main, folder, *overrides, virtual_workers=virtual_workers)
    SingleProcess(Script(main), job, lambda message: None)()
    return job


def train_alone(script: Path, folder: Path, *overrides: str) -> Store:
    """Train the script of a job on one rank in a fork of this process, and return its run directory, which has the record of a job."""
    process = forks().Process(target=_train_script, args=(script, folder, overrides))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    assert process.exitcode == 0, "the reference run failed; its traceback is above"
    return open_store(f"{folder}/alone")


def _train_script(script: Path, folder: Path, overrides: tuple[str, ...]) -> None:
    import torch

    torch.set_num_threads(1)  # as in a worker with one CPU
    main = runpy.run_path(str(script))["main"]
    driver = Script(main)
    given = [f"runs={folder}", "name=alone", *overrides]
    loaded = load_spec(script.with_suffix(".yaml"), given, settings=driver.settings)
    examined = examine(driver, loaded, check_job(loaded))
    job = record_job(loaded, examined.plan, open_store(loaded.spec.run_url), examined.script_data).job
    SingleProcess(Script(main), job, lambda message: None)()


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
