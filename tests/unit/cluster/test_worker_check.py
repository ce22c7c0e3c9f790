"""Tests of the all-reduce with which the doctor measures bandwidth and latency, and of the GPU test."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from undula.cluster.local import free_ports
from undula.cluster.worker_check import time_all_reduce, try_gpus


def test_a_missing_rank_ends_the_measurement_at_the_time_limit() -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
        time_all_reduce("gloo", "127.0.0.1", free_ports(1)[0], rank=0, world_size=2, timeout_s=0.5)
    assert time.monotonic() - started < 20
    assert not dist.is_initialized()


def test_a_single_rank_measures_and_leaves_no_process_group() -> None:
    latency_s, bytes_per_s = time_all_reduce("gloo", "127.0.0.1", free_ports(1)[0], rank=0, world_size=1, timeout_s=10)
    assert latency_s > 0
    assert bytes_per_s > 0
    assert not dist.is_initialized()


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


def with_a_wrong_bit(tensor: Tensor) -> Tensor:
    broken = tensor.clone()
    broken[3, 5] += 1
    return broken


def without_memory(tensor: Tensor) -> Tensor:
    raise torch.cuda.OutOfMemoryError


@pytest.mark.parametrize(
    ("move", "expected"),
    [
        (unchanged, ("GPU 0, L4", None, False)),
        (with_a_wrong_bit, ("GPU 0, L4", "a matrix product has a wrong result", False)),
        (without_memory, ("GPU 0, L4", "its memory is full", True)),
    ],
)
def test_a_gpu_passes_only_with_an_exact_product(
    monkeypatch: pytest.MonkeyPatch, move: Callable[[Tensor], Tensor], expected: tuple[str, str | None, bool]
) -> None:
    """A simulated GPU, as the machine that runs the tests may have none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "L4")
    monkeypatch.setattr(Tensor, "to", lambda self, device: move(self))
    assert list(try_gpus()) == [expected]
