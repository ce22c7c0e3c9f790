"""Whether this process could train: the arithmetic of its GPUs, and the speed of an all-reduce with others, as `undula doctor` asks."""

import time
from collections.abc import Iterator
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

SIDE = 512
"""Of the matrices: whole numbers so small that every product and sum is exact in float32, on any hardware."""
SMALL_TIMES = 50
LARGE_BYTES = 32 * 2**20
"""More than a bucket of DDP's gradients (25 MiB), so that bandwidth is what counts."""
LARGE_TIMES = 5
LARGE_LIMIT_S = 4.0
"""For all of the large ones: over a slow network there are fewer."""


def gpus_seen() -> tuple[int, str | None]:
    """How many GPUs torch sees, and the version of CUDA that it was built with."""
    return torch.cuda.device_count(), torch.version.cuda


def try_gpus() -> Iterator[tuple[str, str | None, bool]]:
    """Multiply two matrices on each GPU: its name, what is wrong with it, and whether that is merely that its memory is full."""
    left = torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE) % 7
    expected = left @ left.T
    for index in range(torch.cuda.device_count()):
        name, problem, is_full = f"GPU {index}", None, False
        try:
            name = f"GPU {index}, {torch.cuda.get_device_name(index)}"
            here = left.to(f"cuda:{index}")
            if not torch.equal((here @ here.T).cpu(), expected):
                problem = "a product of two matrices comes out wrong"
        except torch.cuda.OutOfMemoryError:
            problem, is_full = "its memory is full", True
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        yield name, problem, is_full


def time_all_reduce(
    backend: str, address: str, port: int, rank: int, world_size: int, timeout_s: float
) -> tuple[float, float]:
    """Meet the other ranks, reduce with them and part: seconds for one number, and bytes per second of a large tensor.

    Raises:
        RuntimeError: they did not meet, or a reduction failed.
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
            raise RuntimeError(f"the sum of 1 to {world_size} came out as {total.item():g}")
        small, large = torch.zeros(1, device=device), torch.zeros(LARGE_BYTES // 4, device=device)
        latency_s = median(_seconds(small) for _ in range(SMALL_TIMES))
        slowest = torch.tensor([_seconds(large)], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks must come to the same number of times
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
