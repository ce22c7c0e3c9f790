"""Tests of the exchange over Horovod against that over torch: the gradients are the same at any number of ranks."""

import time
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_steps import ADASUM, FP16, placed, step_gradients
from horovod_ranks import on_horovod_ranks
from torch import nn

from undula.elastic.sockets import cut_sockets, open_sockets
from undula.train.tracebacks import is_of_collective

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make horovod")
SHARES = (4, 4, 3, 3, 2)


SETTINGS: dict[str, dict[str, Any]] = {
    "torch": {},
    "horovod": {"engine": "horovod"},
    "horovod, fp16": {"engine": "horovod", "gradient": FP16},
    "torch, fp16": {"gradient": FP16},
    "adasum": {"gradient": ADASUM},
    "adasum, horovod": {"engine": "horovod", "gradient": ADASUM},
}


def _gradients(rank: int, world_size: int) -> list[list[float]]:
    """Return the gradients of the last of three steps with each engine, one engine after the other. The second step freezes a layer."""
    found = []
    for settings in SETTINGS.values():
        torch.manual_seed(rank)  # all ranks get the weights of rank 0
        module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        torch.manual_seed(1)
        rows = torch.randn(sum(SHARES), 5).split(SHARES)
        engine = placed(module, rank, world_size, len(SHARES), **settings)
        for trains_all in (True, False, True):
            module[0].requires_grad_(trains_all)
            gradients = step_gradients(engine, SHARES, lambda place: module(rows[place]).square().mean())  # noqa: B023
        found.append(list(chain(*gradients)))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_equal_those_of_the_torch_engine(world_size: int) -> None:
    """Five virtual workers with uneven shares give the ranks different numbers of backward passes."""
    for by_engine in on_horovod_ranks(world_size, _gradients):
        plain, horovod, half, torch_half, adasum, adasum_horovod = map(torch.tensor, by_engine)
        assert horovod.tolist() == plain.tolist()
        assert half.tolist() == torch_half.tolist() != plain.tolist()
        torch.testing.assert_close(half, plain, rtol=2e-3, atol=1e-5)
        assert adasum_horovod.tolist() == adasum.tolist()


class Parts(nn.Module):
    """Model with several parts. Each rank uses a different part, and no rank uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 1, dtype=torch.bfloat16) for _ in range(3))
        self.convolution = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)


def _of_several_kinds(rank: int, world_size: int) -> list[list[float] | None]:
    """Return the gradients of two steps. Each rank lacks some of them, and their types are ones that Horovod does not support."""
    torch.manual_seed(rank)
    module = Parts()
    if rank:
        module.mask.fill_(False)
    engine = placed(module, rank, world_size, virtual_workers=2, engine="horovod")
    assert module.mask.tolist() == [True, False]

    def loss_of(place: int) -> torch.Tensor:
        loss = module.parts[place](torch.ones(1, 3, dtype=torch.bfloat16)).sum().float()
        return loss + module.convolution(torch.ones(1, 2, 4, 4)).sum()

    return [step_gradients(engine, (1, 1), loss_of) for _ in range(2)][-1]


def test_a_gradient_that_some_ranks_lack_is_the_same_as_on_one_rank() -> None:
    (alone,) = on_horovod_ranks(1, _of_several_kinds)
    assert alone[4:6] == [None, None]
    assert None not in alone[:4] + alone[6:]
    for found in on_horovod_ranks(2, _of_several_kinds):
        assert found == alone


def _left_behind(rank: int, world_size: int) -> float | None:
    """Let rank 0 wait in a reduction for rank 1, which does not take part, until rank 0 wakes itself."""
    import threading

    import horovod.torch as hvd

    hvd.shutdown()
    dist.barrier()
    before = open_sockets()
    hvd.init()
    own = open_sockets() - before
    assert own
    if rank == 1:
        dist.barrier()  # it joins no reduction before rank 0 has given up
        return None
    threading.Timer(1.0, cut_sockets, [own]).start()
    began = time.monotonic()
    with pytest.raises(Exception, match="Horovod has been shut down") as caught:
        hvd.allreduce(torch.ones(4), op=hvd.Sum, name="waits")
    waited = time.monotonic() - began
    assert is_of_collective(caught.value)
    dist.barrier()
    return waited


def test_a_rank_that_waits_for_a_missing_rank_is_woken() -> None:
    waited = on_horovod_ranks(2, _left_behind)[0]
    assert waited is not None
    assert waited < 15.0  # Horovod itself would wait for 30 s
