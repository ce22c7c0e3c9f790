"""Tests of `undula doctor` in a worker's process: the arithmetic of its GPUs, and the speed of an all-reduce with other processes."""

import time
from collections.abc import Iterator
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

SIDE = 512
"""Number of rows and columns of the matrices. Their entries are small whole numbers, so that every product and sum is exact in float32."""
SMALL_TIMES = 50
"""Number of all-reduces of one number."""
LARGE_BYTES = 32 * 2**20
"""Size in bytes of the large tensor, which is larger than a gradient bucket of DDP (25 MiB), so that bandwidth dominates."""
LARGE_TIMES = 5
"""Maximum number of all-reduces of the large tensor."""
LARGE_LIMIT_S = 4.0
"""Time limit in seconds for all of them together, which reduces their number on a slow network."""


def gpus_seen() -> tuple[int, str | None]:
    """Return the number of GPUs that torch sees and the version of CUDA that it was built with, or None for a build without CUDA."""
    return torch.cuda.device_count(), torch.version.cuda


def try_gpus() -> Iterator[tuple[str, str | None, bool]]:
    """Multiply two matrices on each GPU.

    Yields:
        The name of the GPU, the problem or None, and whether the problem is only that the GPU's memory is full.
    """
    left = torch.arange(SIDE * SIDE, dtype=torch.float32, device="cpu").reshape(SIDE, SIDE) % 7
    expected = left @ left.T
    for index in range(torch.cuda.device_count()):
        name, problem, is_full = f"GPU {index}", None, False
        try:
            name = f"GPU {index}, {torch.cuda.get_device_name(index)}"
            here = left.to(f"cuda:{index}")
            if not torch.equal((here @ here.T).cpu(), expected):
                problem = "a matrix product has a wrong result"
        except torch.cuda.OutOfMemoryError:
            problem, is_full = "its memory is full", True
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        yield name, problem, is_full


def time_all_reduce(
    backend: str, address: str, port: int, rank: int, world_size: int, timeout_s: float
) -> tuple[float, float]:
    """Measure an all-reduce with the other ranks.

    Returns:
        The median time in seconds for one number, and the rate in bytes per second for a large tensor.

    Raises:
        RuntimeError: The ranks did not connect, or a reduction failed.
    """
    timeout = timedelta(seconds=timeout_s)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        total = torch.tensor([float(rank + 1)], device=device)
        dist.all_reduce(total)
        if total.item() != world_size * (world_size + 1) / 2:
            raise RuntimeError(f"the all-reduce of 1 to {world_size} returned {total.item():g}")
        small, large = torch.zeros(1, device=device), torch.zeros(LARGE_BYTES // 4, device=device)
        latency_s = median(_seconds(small) for _ in range(SMALL_TIMES))
        slowest = torch.tensor([_seconds(large)], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # so that all ranks run the same number of all-reduces
        times = max(1, min(LARGE_TIMES, int(LARGE_LIMIT_S / slowest.item())))
        return latency_s, LARGE_BYTES / median(_seconds(large) for _ in range(times))
    finally:
        dist.destroy_process_group()


def _seconds(tensor: Tensor) -> float:
    started = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - started
