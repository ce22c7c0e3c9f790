"""Tests of the worker actor: killing processes, and measuring the memory of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from undula.elastic.ray.actor import ElasticWorker, WorkerMetadata, resident_memory
from undula.elastic.ray.pool import PooledWorker, _that_see
from undula.processes import ProcessIdentity, identity_of


@contextmanager
def other_worker() -> "Iterator[subprocess.Popen[bytes]]":
    """Process with the title of a worker, which waits for the end of its input."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "ray::ElasticWorker.poll_status"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_worker_kills_another_worker_but_no_process_that_reuses_its_id() -> None:
    worker = ElasticWorker.__new__(ElasticWorker)
    with other_worker() as other:
        lost = identity_of(other)
        worker.kill_process(lost)
        assert other.wait(10) == -9
        worker.kill_process(lost)  # the process has ended
    with other_worker() as healthy:
        its = identity_of(healthy)
        worker.kill_process(replace(its, started=its.started - 1))  # that worker has ended, and this one has its id
        worker.kill_process(replace(its, namespace=f"{its.namespace}0"))  # that worker is in another container
        assert healthy.stdin is not None
        healthy.stdin.close()
        assert healthy.wait(10) == 0


def worker_in(namespace: str, pid: int) -> PooledWorker:
    """Worker on a machine whose containers share its hostname."""
    process = ProcessIdentity(namespace, pid, started=pid)
    metadata = WorkerMetadata("host", "node", "10.0.0.1", pid, {}, process)
    return PooledWorker(actor=None, node="node", preparing=None, started=0.0, metadata=metadata)


def test_a_lost_worker_is_killed_by_all_workers_that_see_it_and_by_no_other() -> None:
    near, nearer, far = worker_in("boot pid:[1]", 5), worker_in("boot pid:[1]", 6), worker_in("boot pid:[2]", 7)
    starting = PooledWorker(actor=None, node="node", preparing=None, started=0.0)
    lost = worker_in("boot pid:[1]", 214).metadata
    assert lost is not None
    assert _that_see(lost, [far, near, starting, nearer]) == [near, nearer]
    unknown = worker_in("", 214).metadata
    assert unknown is not None
    assert _that_see(unknown, [worker_in("", 5)]) == []


def test_resident_memory_grows_with_what_the_process_writes_to() -> None:
    before = resident_memory()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert before + 60 * 2**20 < resident_memory() < before + 128 * 2**20
    del block
