"""Tests of what a step does on a GPU: its timestamps, its random numbers, its sums, and the buffers of its model."""

import subprocess
import sys

import torch
from torch import nn

from undula.parallel.device_clock import mark_on
from undula.parallel.reduce.tree import TreeSum
from undula.state.pieces import rank_state
from undula.train.buffers import BufferMean
from undula.train.randomness import seed_micro_batch
from undula.train.saver import additive_digest

DETERMINISTIC = """
import torch
from undula.elastic.ray.actor import warm_up
from undula.train.randomness import compute_deterministically

compute_deterministically()
warm_up(torch.device("cuda", 0))
left = torch.ones(64, 64, device="cuda")
print(float((left @ left).sum()))
"""


def test_a_timestamp_measures_the_work_of_the_device(device: torch.device) -> None:
    left = torch.ones(4096, 4096, device=device)
    begin = mark_on(device)
    for _ in range(8):
        left = (left @ left).clamp(max=1.0)
    end = mark_on(device)
    assert 0 < end.seconds_since(begin) < 60
    assert end.seconds_since(end) == 0


def test_dropout_of_a_micro_batch_does_not_depend_on_what_was_drawn_before(device: torch.device) -> None:
    drawn = []
    for before in (0, 100):
        torch.rand(before + 1, device=device)
        seed_micro_batch(1, step=2, virtual_worker=3, micro_batch=4)
        drawn.append(nn.functional.dropout(torch.ones(1000, device=device)))
    assert torch.equal(*drawn)


def test_sums_and_digests_are_those_of_the_cpu(device: torch.device) -> None:
    torch.manual_seed(0)
    terms = [torch.randn(1000) * 10.0**power for power in range(-6, 4)]
    sums, digests = [], []
    for place in (torch.device("cpu"), device):
        tree = TreeSum(None, len(terms))
        for virtual_worker, term in enumerate(terms):
            tree.add(virtual_worker, term.to(place))
        sums.append(tree.total(like=terms[0].to(place)).cpu())
        digests.append(additive_digest(rank_state({"w": terms[0].to(place)}).pieces))
    assert torch.equal(*sums)
    assert digests[0] == digests[1]


def test_a_buffer_that_a_forward_pass_makes_on_the_cpu_moves_to_the_gpu(device: torch.device) -> None:
    module = nn.Linear(1, 1).to(device)
    module.register_buffer("seen", None)
    summed: list[str] = []
    buffers = BufferMean(module)
    buffers._all_reduce = lambda tensor: summed.append(tensor.device.type)
    buffers.begin_step(0, 1)
    buffers.begin_micro_batch()
    module.seen = torch.ones(2)
    buffers.end_micro_batch(1, 0)
    buffers.end_step(1)
    assert module.seen.device == device
    assert set(summed) == {"cuda"}, "NCCL sums nothing else"


def test_a_deterministic_worker_may_multiply_after_its_warm_up() -> None:
    done = subprocess.run([sys.executable, "-c", DETERMINISTIC], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 64.0**3
