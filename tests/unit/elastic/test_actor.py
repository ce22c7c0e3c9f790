"""Tests of the worker actor: killing processes, and measuring the memory of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from undula.elastic.ray.actor import ElasticWorker, resident_memory


@contextmanager
def process_titled(title: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Process that waits for the end of its input, with a title in its command line."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", title]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # before that, the process may not have its command line yet
            yield process
        finally:
            process.kill()


def test_a_worker_kills_another_worker_but_no_process_that_reuses_its_id() -> None:
    worker = ElasticWorker.__new__(ElasticWorker)
    with process_titled("ray::ElasticWorker.poll_status") as other:
        worker.kill_process(other.pid)
        assert other.wait(10) == -9
        worker.kill_process(other.pid)  # the process has ended
    with process_titled("editor") as stranger:
        worker.kill_process(stranger.pid)
        assert stranger.stdin is not None
        stranger.stdin.close()
        assert stranger.wait(10) == 0


def test_resident_memory_grows_with_what_the_process_writes_to() -> None:
    before = resident_memory()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert before + 60 * 2**20 < resident_memory() < before + 128 * 2**20
    del block
