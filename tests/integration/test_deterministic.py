"""Tests of `deterministic: true`: any sequence of world sizes, with a crash, gives the same bits, and the certificate confirms it."""

import signal
import subprocess
import sys

import pytest
from jobs_kit import STREAMED, Finished, Jobs, await_checkpoint

from undula.state.processes import signal_group
from undula.storage import open_store

STEPS = 60
SETTINGS = (
    "deterministic=true",
    "gradient.max_norm=1.0",
    "checkpoint.every_steps=10",
)


@pytest.fixture(scope="module")
def alone(session_jobs: Jobs) -> Finished:
    return session_jobs.alone("exact-1", *session_jobs.past_an_epoch(), *SETTINGS)


@pytest.mark.nightly
def test_a_crash_and_another_world_size_do_not_change_a_bit(alone: Finished, session_jobs: Jobs) -> None:
    """Six virtual workers run on four ranks, which does not divide six, and then on two. Ray Data reads all of their data, and an
    epoch ends during the run.
    """
    settings = (*session_jobs.past_an_epoch(), *SETTINGS, *STREAMED)
    process = session_jobs.start("exact-moves", *session_jobs.workers(4), *settings)
    await_checkpoint(process, open_store(f"{session_jobs.runs}/exact-moves"), 10)
    signal_group(process, signal.SIGKILL)
    process.wait()
    done = session_jobs.run("exact-moves", *session_jobs.workers(2), *settings)
    assert done.status == 0, done.err
    assert set(done.column("world_size")) == {2, 4}
    assert done.column("sample_digest") == alone.column("sample_digest")
    assert_same_bits(done, alone)


def assert_same_bits(done: Finished, alone: Finished) -> None:
    assert done.column("loss") == alone.column("loss")
    digests = done.column("weights_digest")
    assert digests == alone.column("weights_digest")
    assert [step for step, digest in enumerate(digests) if digest is not None] == [9, 19, 29, 39, 49, 59]
    command = [sys.executable, "-m", "undula.cli", "verify", done.store.url, "--against", alone.store.url]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "the weights equal those of exact-1 bit for bit, according to 6 digests" in said.stdout
    assert "identical losses" in said.stdout
