"""Tests of resubmission: a run whose driver and workers were killed continues without a change of its losses."""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jobs_kit import Finished, Jobs, await_checkpoint, relative_difference

from undula.cluster.local import LocalCluster, local_cluster
from undula.state.commit import find_commits
from undula.state.events import CrashEvent, StartEvent, WarningEvent
from undula.state.ledger import events_of, last_event
from undula.state.processes import descendants, send_signal
from undula.storage import open_store

STEPS = 90
# The model is wide enough for the run not to end before it is killed, and the rate low enough for rounding not to grow.
SETTINGS = (
    f"plan.max_steps={STEPS}",
    "config.model.width=64",
    "schedule.base_lr=1e-4",
    "checkpoint.every_steps=10",
    "config.model.dropout=0.1",
    "workers.min=1",
    "workers.max=2",
)


def kill_at(text: str, runs: str, step: int) -> None:
    """Train on a separate cluster until the ledger has `step`, then SIGKILL the driver, the workers and the whole cluster."""
    with local_cluster(num_cpus=4) as cluster:
        jobs = Jobs(cluster, text, runs)
        process = jobs.start("killed", *SETTINGS)
        store = open_store(f"{runs}/killed")
        await_checkpoint(process, store, step)
        # Kill each process: Ray's processes are in several groups, and without its parent a raylet lets the workers train on for a while.
        for each in (process, cluster.process, *descendants(process), *descendants(cluster.process)):
            send_signal(each, signal.SIGKILL)
        process.wait()


def assert_certified(run: Finished, against: Finished) -> None:
    """Check the run with `undula verify`, as a user would."""
    command = [sys.executable, "-m", "undula.cli", "verify", run.store.url, "--against", against.store.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{STEPS} steps as in left-alone: the same samples and learning rates" in done.stdout


@pytest.fixture(scope="module")
def left_alone(session_jobs: Jobs) -> Finished:
    return session_jobs.alone("left-alone", *SETTINGS)


@pytest.mark.nightly
def test_a_run_that_is_killed_twice_has_the_losses_of_an_uninterrupted_run(
    left_alone, session_jobs: Jobs, tmp_path: Path
) -> None:
    runs = str(tmp_path / "runs")
    for step in (STEPS // 3, 2 * STEPS // 3):
        kill_at(session_jobs.text, runs, step)
    last = Jobs(session_jobs.cluster, session_jobs.text, runs).run("killed", *SETTINGS)
    assert last.status == 0, last.err

    assert last.column("step") == list(range(STEPS))
    assert sorted(set(last.column("attempt"))) == [1, 2, 3]
    assert last.column("sample_digest") == left_alone.column("sample_digest")
    assert relative_difference(last.column("loss"), left_alone.column("loss")) < 1e-5
    assert_certified(last, against=left_alone)

    again = Jobs(session_jobs.cluster, session_jobs.text, runs).run("killed", *SETTINGS)
    assert again.status == 0
    assert "is finished, so there is nothing to do" in again.out
    assert again.ledger.steps.equals(last.ledger.steps)


@pytest.mark.nightly
def test_a_killed_worker_loses_no_step_while_another_lives(left_alone, jobs: Jobs) -> None:
    process = jobs.start("worker-killed", *SETTINGS)
    store = open_store(f"{jobs.runs}/worker-killed")
    await_checkpoint(process, store, 20)
    send_signal(worker_of(jobs.cluster), signal.SIGKILL)
    done = jobs.finish(process, "worker-killed")
    assert done.status == 0, done.err
    (crash,) = events_of(done.ledger.events, CrashEvent)
    assert crash.cause == "failure"
    kinds = done.ledger.events["kind"].to_pylist()
    assert events_of(done.ledger.events, StartEvent)[-1].origin == "the memory of a worker"
    assert done.ledger.replaced.num_rows == 0
    assert kinds.count("end") == 1
    assert done.column("sample_digest") == left_alone.column("sample_digest")
    assert relative_difference(done.column("loss"), left_alone.column("loss")) < 1e-5


def worker_of(cluster: LocalCluster) -> psutil.Process:
    """Return the process of a worker of a cluster."""
    for process in descendants(cluster.process):
        with suppress(psutil.Error):
            if "ElasticWorker" in " ".join(process.cmdline()):
                return process
    raise AssertionError("no train worker is running")


def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(left_alone, jobs: Jobs) -> None:
    settings = (*SETTINGS, "checkpoint.snapshot_every_steps=0")
    store = jobs.alone("damaged", *settings, until=20).store
    newest = find_commits(store)[0][0]
    victim = f"{newest.folder}/{next(iter(newest.files))}"
    data = bytearray(store.read(victim))
    data[len(data) // 2] ^= 1
    store.write(victim, bytes(data))

    done = jobs.run("damaged", *settings)
    assert done.status == 0, done.err
    skipped = last_event(done.ledger.events, WarningEvent)
    assert skipped is not None
    assert skipped.code == "checkpoint_skipped"
    assert skipped.detail.startswith(f"{store.url}/{victim} is damaged")
    start = events_of(done.ledger.events, StartEvent)[-1]
    assert (start.origin, start.step) == ("the checkpoint", newest.step - 10)
    assert relative_difference(done.column("loss"), left_alone.column("loss")) < 1e-5


def test_fresh_starts_over(jobs: Jobs) -> None:
    jobs.alone("fresh", "plan.max_steps=10")
    done = jobs.run("fresh", "plan.max_steps=12", *jobs.workers(1), "--fresh")
    assert done.status == 0, done.err
    assert done.column("step") == list(range(12))
    (attempt,) = set(done.column("attempt"))
    assert attempt > 1  # numbers are not used again, because workers of the deleted run may still live
