"""Tests that the model of a link, fitted to messages over it, has its latency and its rate, and predicts an all-reduce over it."""

import json
import sys

import pytest
from shaped_link import ADDRESSES, NAMES, can_shape, in_namespace, shaped_link

from undula.driver.measure import SIZES
from undula.plan.scaling import fit_link

pytestmark = pytest.mark.soak
DELAYS = 2
"""Number of delays that a message of gloo takes, because its receiver asks for it."""
OWN_MS = 0.7
"""Milliseconds that gloo and the relay of the link may take themselves."""
OTHER_SIZES = (2 * 2**20, 6 * 2**20, 12 * 2**20)
PROGRAM = """
import json, sys, time
from datetime import timedelta
from statistics import median
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from undula.driver.measure import message_seconds

address, rank, sizes, others = sys.argv[1], int(sys.argv[2]), *map(json.loads, sys.argv[3:])
message_seconds(torch.device("cpu"), address, 29500, rank, [2**24])
messages = message_seconds(torch.device("cpu"), address, 29501, rank, sizes)
store = TCPStore(address, 29502, 2, is_master=rank == 0, timeout=timedelta(seconds=100))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

def reduced(size):
    tensor = torch.zeros(size // 4)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - began

reduced(2**24)
print(json.dumps([messages, [median(reduced(size) for _ in range(5)) for size in others]]))
"""


def measured() -> tuple[list[float], list[float]]:
    """Return the durations of messages of SIZES, and of all-reduces of OTHER_SIZES, between the namespaces."""
    arguments = (json.dumps(SIZES), json.dumps(OTHER_SIZES))
    ranks = [
        in_namespace(name, sys.executable, "-c", PROGRAM, ADDRESSES[0], str(rank), *arguments)
        for rank, name in enumerate(NAMES)
    ]
    found = []
    for rank in ranks:
        out, err = rank.communicate(timeout=300)
        assert rank.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    both = [[max(pair) for pair in zip(*each, strict=True)] for each in zip(*found, strict=True)]
    return both[0], both[1]


@pytest.mark.parametrize(("delay_ms", "mbit"), [(1.0, 1000.0), (1.0, 100.0), (10.0, 100.0)])
def test_a_fitted_link_has_the_latency_and_the_rate_of_the_real_one(delay_ms: float, mbit: float) -> None:
    if not can_shape():
        pytest.skip("this process may not make network namespaces and TUN devices")
    with shaped_link(delay_ms / 1e3, mbit * 1e6 / 8):
        messages, reductions = measured()
    link = fit_link(SIZES, messages)
    assert DELAYS * delay_ms * 0.9 < link.latency_s * 1e3 < DELAYS * delay_ms * 1.1 + OWN_MS
    assert link.bytes_per_s * 8e-6 == pytest.approx(mbit, rel=0.1)
    for size, seconds in zip(OTHER_SIZES, reductions, strict=True):
        assert seconds == pytest.approx(link.ring_s(size, 2), rel=0.15)
