"""The trial all-reduce, of which the doctor tells bandwidth and latency."""

import time

import pytest
import torch.distributed as dist

from undula.cluster.local import free_ports
from undula.cluster.worker_check import time_all_reduce, try_gpus


def test_a_rank_that_does_not_come_costs_the_limit_and_no_more() -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
        time_all_reduce("gloo", "127.0.0.1", free_ports(1)[0], rank=0, world_size=2, timeout_s=0.5)
    assert time.monotonic() - started < 20
    assert not dist.is_initialized()


def test_one_rank_alone_measures_and_leaves_no_group() -> None:
    latency_s, bytes_per_s = time_all_reduce("gloo", "127.0.0.1", free_ports(1)[0], rank=0, world_size=1, timeout_s=10)
    assert latency_s > 0
    assert bytes_per_s > 0
    assert not dist.is_initialized()


def test_every_gpu_of_this_machine_multiplies_rightly() -> None:
    assert [problem for _, problem, _ in try_gpus() if problem] == []
