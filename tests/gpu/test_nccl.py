"""Tests that a process survives the failure of an NCCL process group and can join another one, as a worker does when a rank is lost."""

import os
import subprocess
import sys

import pytest
import torch

from undula.elastic.ray.environment import SURVIVE_NCCL

LIMIT_S = 300.0
ANOTHER_GROUP = """
import torch, torch.distributed as dist

def join(rank=0, world_size=1, store=None):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=store or dist.HashStore(), rank=rank, world_size=world_size)

def total(rank=0):
    one = torch.ones(1, device=f"cuda:{rank}")
    dist.all_reduce(one)
    return one.item()
"""
ALONE = """
join()
assert total() == 1
dist.distributed_c10d._abort_process_group()
join()
assert total() == 1
dist.destroy_process_group()
print("joined another group")
"""
SURVIVOR = """
import os, signal, sys, threading, time
from contextlib import suppress

rank, folder = int(sys.argv[1]), sys.argv[2]
join(rank, 2, dist.FileStore(f"{folder}/store", 2))
assert total(rank) == 2
if rank == 1:
    signal.raise_signal(signal.SIGKILL)

def abort():
    time.sleep(5)  # the watchdog sees the failure first, as the controller may take longer
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()

threading.Thread(target=abort).start()
with suppress(RuntimeError):  # an aborted collective need not raise
    total(rank)
dist.distributed_c10d._abort_process_group()
join(0)
assert total() == 1
dist.destroy_process_group()
print("joined another group")
"""


def start(script: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", ANOTHER_GROUP + script, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **SURVIVE_NCCL}, stdout=pipe, stderr=pipe, text=True)


def test_a_process_joins_another_group_after_it_has_aborted_its_own() -> None:
    out, err = start(ALONE).communicate(timeout=LIMIT_S)
    assert out == "joined another group\n", err


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank, and torch sees fewer than 2")
def test_a_rank_that_has_lost_another_one_joins_another_group(tmp_path: object) -> None:
    survivor, lost = (start(SURVIVOR, str(rank), str(tmp_path)) for rank in range(2))
    assert lost.wait(LIMIT_S) == -9
    out, err = survivor.communicate(timeout=LIMIT_S)
    assert out == "joined another group\n", err
