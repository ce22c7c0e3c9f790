"""Helpers that run a function on several ranks, in separate processes with gloo."""

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "pytest"),
    *(
        "undula.train.run",
        "undula.telemetry.tensorboard",
        "undula.state.checkpoint_files",
        "horovod.torch",
        "undula.optim.lamb",
        "undula.optim.lars",
    ),
    "undula.cli.job_script",
)
"""Modules that ranks import, or torch imports in their first step. The process that the ranks are forked from imports them once."""


def forks() -> ForkServerContext:
    """Return a context whose processes are forks of a process without threads that has imported PRELOADED."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call function(rank, world_size, *arguments) in one process per rank and return the results by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = forks()
    queue = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port, queue, function, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    results = {}
    while len(results) < world_size:
        rank, result, error = queue.get(timeout=60)
        results[rank] = result
        if error:
            for process in processes:
                process.kill()
            raise AssertionError(f"rank {rank}: {error}")
    for process in processes:
        process.join()
    return [results[rank] for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, port: int, queue: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        queue.put((rank, function(rank, world_size, *arguments), None))
    except BaseException:  # includes the failures of pytest, which are not Exceptions; the test's process raises them
        queue.put((rank, None, traceback.format_exc()))
    dist.destroy_process_group()
