"""Helpers that run a function on several ranks, in separate processes with gloo."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "pytest"),
    *(
        "undula.train.run",
        "undula.state.checkpoint_files",
        "horovod.torch",
        "undula.optim.lamb",
        "undula.optim.lars",
    ),
    *("undula.entry", "undula.testing.conformance"),
)
"""Modules that ranks import, or torch imports in their first step. The process that the ranks are forked from imports them once."""
FROZEN = "frozen"
"""Module that this process imports last."""


def forks(*modules: str) -> ForkServerContext:
    """Return a context whose processes are forks of a process without threads that has imported PRELOADED.

    It has imported `modules`, too, if this call is the first one of the test process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *modules, FROZEN])
    # Python 3.11 does not pass sys.path on to the server, which skips modules that it does not find.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, limit_s: float = 300) -> list[Any]:
    """Call function(rank, world_size, *arguments) in one process per rank and return the results by rank.

    The first result, and each later one, must come within `limit_s` seconds.
    """
    context = forks()
    queue = context.Queue()
    results = {}
    with TemporaryDirectory() as folder:
        # Ranks that find each other through a file need no port, which another test could take before they do.
        processes = [
            context.Process(target=_rank, args=(rank, world_size, f"{folder}/ranks", queue, function, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        while len(results) < world_size:
            rank, result, error = queue.get(timeout=limit_s)
            results[rank] = result
            if error:
                for process in processes:
                    process.kill()
                raise AssertionError(f"rank {rank}: {error}")
        for process in processes:
            process.join()
    return [results[rank] for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, file: str, queue: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
        queue.put((rank, function(rank, world_size, *arguments), None))
    except BaseException:  # includes the failures of pytest, which are not Exceptions; the test's process raises them
        queue.put((rank, None, traceback.format_exc()))
    dist.destroy_process_group()
