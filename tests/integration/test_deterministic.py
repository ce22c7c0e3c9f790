"""Tests of `deterministic: true`: any sequence of world sizes, with a crash, gives the same bits, and the certificate confirms it."""

import os
import signal
import subprocess
import sys

import pytest
from jobs_kit import Finished, Jobs, await_checkpoint

from undula.storage import open_store

STEPS = 30
SETTINGS = (
    "deterministic=true",
    f"plan.max_steps={STEPS}",
    "config.model.dropout=0.1",
    "gradient.max_norm=1.0",
    "checkpoint.every_steps=10",
)


@pytest.fixture(scope="module")
def alone(session_jobs: Jobs) -> Finished:
    done = session_jobs.run("exact-1", *session_jobs.workers(1), *SETTINGS)
    assert done.status == 0, done.err
    return done


def test_a_crash_and_another_world_size_do_not_change_a_bit(alone: Finished, session_jobs: Jobs) -> None:
    """The six virtual workers run on four ranks, which does not divide six, and then on two."""
    process = session_jobs.start("exact-moves", *session_jobs.workers(4), *SETTINGS)
    await_checkpoint(process, open_store(f"{session_jobs.runs}/exact-moves"), 10)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = session_jobs.run("exact-moves", *session_jobs.workers(2), *SETTINGS)
    assert done.status == 0, done.err
    assert set(done.column("world_size")) == {2, 4}
    assert_same_bits(done, alone)


def assert_same_bits(done: Finished, alone: Finished) -> None:
    assert done.column("loss") == alone.column("loss")
    digests = done.column("weights_digest")
    assert digests == alone.column("weights_digest")
    assert [step for step, digest in enumerate(digests) if digest is not None] == [9, 19, 29]
    command = [sys.executable, "-m", "undula.cli", "verify", done.store.url, "--against", alone.store.url]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "the weights equal those of exact-1 bit for bit, according to 3 digests" in said.stdout
    assert "losses within 0.0e+00" in said.stdout
