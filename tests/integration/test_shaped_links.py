"""Tests that the model of a link, fitted to messages over it, has its latency and its rate, and predicts an all-reduce and a step over it.

The tests of steps print what docs/planning.md says of them: `pytest -m nightly -s tests/integration/test_shaped_links.py`.
"""

import json
import subprocess
import sys
from math import ceil
from pathlib import Path
from statistics import mean, median

import pytest
from shaped_link import ADDRESSES, DEVICE, NAMES, can_shape, in_namespace, shaped_link

from undula.driver.measure import SIZES
from undula.plan.memory import BUCKET_BYTES
from undula.plan.scaling import fit_link
from undula.plan.step_time import BACKWARD_SHARE

pytestmark = pytest.mark.nightly
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


STEP_PROGRAM = """
import json, sys, time
from datetime import timedelta
sys.path[:0] = [sys.argv[4], f"{sys.argv[4]}/tests"]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import TCPStore
from engine_steps import placed, run_backward
from jobs.gpt import GPT, GPTConfig

address, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
store = TCPStore(address, port, 2, is_master=rank == 0, timeout=timedelta(seconds=100))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = GPT(GPTConfig())
parts = torch.randint(256, (16, GPTConfig().context + 1)).split([4] * 4)
engine = placed(model, rank, 2, 4)
engine.prepare(model, torch.optim.AdamW(model.parameters()))

def loss(place):
    return F.cross_entropy(model(parts[place][:, :-1]).flatten(0, 1), parts[place][:, 1:].flatten())

taken = []
for _ in range(9):
    dist.barrier()
    began = time.perf_counter()
    run_backward(engine, [4] * 4, loss)
    engine.step()
    taken.append(time.perf_counter() - began)
print(json.dumps([taken[2:], sum(each.nbytes for each in model.parameters())]))
"""
"""Steps of the main job's model with two ranks and four virtual workers."""
ROOT = str(Path(__file__).parents[2])


def step_seconds(names: tuple[str, str], address: str, device: str, port: int) -> tuple[float, int]:
    """Return the median duration of a step on the slower of two ranks in these namespaces, and the bytes of a gradient."""
    ranks = [
        in_namespace(
            name, "env", f"GLOO_SOCKET_IFNAME={device}",
            *(sys.executable, "-c", STEP_PROGRAM, address, str(rank), str(port), ROOT),
        )
        for rank, name in enumerate(names)
    ]  # fmt: skip
    found = [json.loads(out.splitlines()[-1]) for out in map(output_of, ranks)]
    return median(max(pair) for pair in zip(*(taken for taken, _ in found), strict=True)), found[0][1]


def output_of(rank: "subprocess.Popen[str]") -> str:
    out, err = rank.communicate(timeout=300)
    assert rank.returncode == 0, err
    return out


def measured() -> tuple[list[float], list[float]]:
    """Return the durations of messages of SIZES, and of all-reduces of OTHER_SIZES, between the namespaces."""
    arguments = (json.dumps(SIZES), json.dumps(OTHER_SIZES))
    ranks = [
        in_namespace(name, sys.executable, "-c", PROGRAM, ADDRESSES[0], str(rank), *arguments)
        for rank, name in enumerate(NAMES)
    ]
    found = []
    for rank in ranks:
        found.append(json.loads(output_of(rank).splitlines()[-1]))
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


@pytest.mark.parametrize(("delay_ms", "mbit"), [(1.0, 1000.0), (1.0, 100.0), (10.0, 1000.0), (10.0, 100.0)])
def test_a_step_takes_what_one_over_the_loopback_and_the_link_predict(delay_ms: float, mbit: float) -> None:
    if not can_shape():
        pytest.skip("this process may not make network namespaces and TUN devices")
    with shaped_link(delay_ms / 1e3, mbit * 1e6 / 8):
        same = NAMES[0], NAMES[0]
        before, _ = step_seconds(same, "127.0.0.1", "lo", 29600)
        messages, _ = measured()
        taken, size = step_seconds((NAMES[0], NAMES[1]), ADDRESSES[0], DEVICE, 29601)
        after, _ = step_seconds(same, "127.0.0.1", "lo", 29602)
    link, local = fit_link(SIZES, messages), mean((before, after))
    # As in undula.plan.step_time: all buckets but the last one travel while the last of two passes computes.
    hidden = local / 2 * BACKWARD_SHARE * (1 - 1 / max(ceil(size / BUCKET_BYTES), 1))
    predicted = local + max(link.exchange_s(size, 4, 2) - hidden, 0.0)
    print(
        f"{mbit:g} Mbit/s, {delay_ms:g} ms: fitted {link.bytes_per_s * 8e-6:.0f} Mbit/s, {link.latency_s * 1e3:.1f} ms; "
        f"step {taken:.3f} s, predicted / measured {predicted / taken:.2f}"
    )
    assert predicted == pytest.approx(taken, rel=0.25)
