"""Tests of jobs on a node whose GPU Ray counts and torch does not see, as with a build of torch for CPUs. A label tells its memory."""

import json
import re
import runpy
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from forked_drivers import with_forked_drivers
from jobs_kit import LANGUAGE_MODEL, Jobs, job_json
from memory_kit import measured
from waiting import wait_until

from undula.cluster.local import LocalCluster, local_cluster
from undula.config.job import load_spec
from undula.driver.record import job_of
from undula.plan.fleet import GPU_GIB
from undula.plan.gpus import CONTEXT_BYTES
from undula.state.events import EstimateEvent
from undula.state.ledger import decode_events

SCRIPT = """
import os
import time
from pathlib import Path

import language_model
import undula
from language_model import Config

FOLDER = Path(__file__).parent

def note(name):
    with (FOLDER / name).open("a") as file:
        file.write(f"{os.environ.get('PYTHONBREAKPOINT')} {os.getpid()}\\n")

print("top of the script", flush=True)
note("executions")

def train(run):
    language_model.train(run)

if __name__ == "__main__":
    undula.main(train, config=Config)
"""
COUNTED = re.compile("^0 ", re.MULTILINE)
"""Beginning of what the process notes that counts a step, in which `breakpoint()` does nothing."""
GIB = 0.7
"""Memory of the GPU by its label."""
TRAINING = "starting 1 to 2 workers with 1 GPU each ..."


@pytest.fixture(scope="module")
def with_a_gpu(forking_python: str) -> Iterator[LocalCluster]:
    """Cluster of one node for which Ray counts one GPU, of 0.7 GiB."""
    env = {
        "RAY_OVERRIDE_RESOURCES": '{"GPU": 1, "accelerator_type:T4": 1}',
        "RAY_OVERRIDE_LABELS": json.dumps({GPU_GIB: f"{GIB}"}),
    }
    with local_cluster(num_cpus=2, env=env, python=forking_python) as running:
        yield with_forked_drivers(running)


@pytest.fixture
def jobs(with_a_gpu: LocalCluster, text: str, tmp_path: Path) -> Jobs:
    folder = tmp_path / "job"
    shutil.copytree(LANGUAGE_MODEL.parent, folder)
    return replace(Jobs(with_a_gpu, text, str(tmp_path / "runs")), script=folder / LANGUAGE_MODEL.name)


def noting(jobs: Jobs, begin: str = "pass") -> Jobs:
    """Return a runner of a script that notes its executions, and does something where its train function begins."""
    script = jobs.script.with_name("noting.py")
    script.write_text(SCRIPT.replace("    language_model.train", f"    {begin}\n    language_model.train"))
    shutil.copy(LANGUAGE_MODEL.with_suffix(".yaml"), script.with_suffix(".yaml"))
    return replace(jobs, script=script)


@pytest.mark.nightly
def test_a_gpu_that_torch_does_not_see_ends_the_start_with_one_sentence(jobs: Jobs) -> None:
    done = jobs.run("refused", "plan.max_steps=4")
    assert done.status == 3
    assert TRAINING in done.out
    (sentence,) = done.err.splitlines()
    assert sentence.startswith("undula: no worker can train on node ")
    assert "Ray has reserved 1 GPU, but torch " in sentence
    assert sentence.endswith("install a build of torch with CUDA on the node, or set workers.gpus=0 to train on CPUs")
    assert job_json(done.store)["spec"]["workers"]["gpus"] == 1.0
    assert done.ledger.steps.num_rows == 0
    assert "crash" not in done.ledger.events["kind"].to_pylist(), "the start was tried again"


@pytest.mark.nightly
def test_a_worker_without_a_gpu_trains_on_the_cpu_sees_no_gpu_and_is_not_counted(jobs: Jobs) -> None:
    jobs = noting(jobs, "print('GPUs:', repr(os.environ.get('CUDA_VISIBLE_DEVICES')), 'device:', run.device)")
    done = jobs.run("cpus", "plan.max_steps=4", "workers.gpus=0")
    assert done.status == 0, done.err
    assert "starting 1 to 2 workers without a GPU ..." in done.out
    assert "GPUs: '' device: cpu" in done.out
    assert done.column("step") == list(range(4))
    assert job_json(done.store)["spec"]["workers"]["gpus"] == 0.0
    assert not COUNTED.search((jobs.script.parent / "executions").read_text())


LARGE = ("config.model.width=64", "plan.global_batch=1024", "plan.virtual_workers=2", "plan.max_steps=1")
"""Settings with which a step of the main job does not fit into the GPU."""


def step_bytes(jobs: Jobs, name: str, *overrides: str) -> int:
    """Return the most memory of tensors in a real run of the main job, in this process."""
    defined = runpy.run_path(str(jobs.script))
    given = [each for each in jobs.command(name, *overrides) if "=" in each]
    loaded = load_spec(jobs.script.with_suffix(".yaml"), given, defined["Config"])
    return measured(defined["train"], job_of(loaded, ""))


def expected(jobs: Jobs, *overrides: str) -> EstimateEvent:
    """Return what a run expected of its workers, after it has tried to start them."""
    done = jobs.run("fitting", *overrides)
    assert TRAINING in done.out, done.err
    assert done.status == 3
    (estimate,) = (event for event in decode_events(done.ledger.events) if isinstance(event, EstimateEvent))
    return estimate


def test_a_job_that_does_not_fit_is_refused_before_a_worker_starts_and_what_it_names_fits_in_a_real_run(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = jobs.run("large", *LARGE)
    assert refused.status == 2
    assert "starting" not in refused.out
    (sentence,) = refused.err.splitlines()
    pattern = r"but the cluster's T4 has 0.7 GiB; set (.*), which needs ([\d.]+) GiB, or workers.check_memory=false to train .*$"
    named = re.search(pattern, sentence)
    assert named, sentence
    assert not refused.store.exists("job.json"), "a run has begun"

    estimate = expected(jobs, *LARGE, *named[1].split())
    assert f"{estimate.needed_bytes / 2**30:.1f}" == named[2]

    monkeypatch.syspath_prepend(str(jobs.script.parent))
    room = GIB * 2**30 - CONTEXT_BYTES
    assert step_bytes(jobs, "real-large", *LARGE) > room
    assert step_bytes(jobs, "real-fitting", *LARGE, *named[1].split()) == pytest.approx(
        estimate.allocated_bytes, rel=0.07
    )
    assert estimate.needed_bytes - CONTEXT_BYTES <= room


def test_the_check_can_be_turned_off(jobs: Jobs) -> None:
    done = jobs.run("unchecked", *LARGE, "workers.check_memory=false")
    assert TRAINING in done.out
    assert "estimate" not in done.ledger.events["kind"].to_pylist()


@pytest.mark.nightly
def test_a_script_that_may_take_another_way_on_a_gpu_is_warned_and_not_refused(jobs: Jobs) -> None:
    estimate = expected(noting(jobs, "assert run.device.type != 'cuda'"), *LARGE)
    assert estimate.message.endswith("of the 0.7 GiB of T4, which may be too little.")


def test_a_script_that_cannot_be_counted_starts_its_workers_as_without_the_check(jobs: Jobs) -> None:
    jobs = noting(jobs, "note('writes') if run.rank == 0 else 1 / 0")
    done = jobs.run("failing")
    assert done.status == 3, done.err
    assert TRAINING in done.out
    assert done.out.count("top of the script") == 1
    assert len(done.err.splitlines()) == 1
    folder = jobs.script.parent
    assert len(COUNTED.findall((folder / "executions").read_text())) == 1
    assert not COUNTED.search((folder / "writes").read_text()), "it did what rank 0 does"
    assert "estimate" not in done.ledger.events["kind"].to_pylist()


@pytest.mark.nightly
def test_ctrl_c_leaves_no_count_behind(jobs: Jobs) -> None:
    jobs = noting(jobs, "run.rank == 0 or (note('hangs'), time.sleep(600))")
    driver, hangs = jobs.start("stopped"), jobs.script.with_name("hangs")
    wait_until(lambda: hangs.exists() and hangs.read_text().endswith("\n"), process=driver)
    process = psutil.Process(int(hangs.read_text().split()[1]))
    driver.send_signal(signal.SIGINT)
    done = jobs.finish(driver, "stopped")
    assert done.status != 0
    assert "starting" not in done.out
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 30)
