"""Tests of Horovod's reduction against that of torch: the gradients are the same at any number of ranks."""

import time

import pytest
import torch
import torch.distributed as dist
from horovod_ranks import on_horovod_ranks
from torch import nn

from undula.elastic.sockets import cut_sockets, open_sockets
from undula.errors import UsageError
from undula.parallel.collectives import all_reduce_over
from undula.parallel.engines.data_parallel import DataParallelEngine
from undula.parallel.engines.engine import Engine
from undula.parallel.engines.exact import ExactEngine
from undula.parallel.engines.select import make_engine
from undula.parallel.layout import join_layout
from undula.parallel.spec import GradientSpec
from undula.plan.plan import MicroBatch, assign
from undula.train.tracebacks import is_of_collective

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make horovod")
SHARES = (4, 4, 3, 3, 2)


def engine_named(name: str, rank: int, world_size: int) -> Engine:
    from undula.parallel.engines.horovod import HorovodEngine, sum_over_horovod

    layout = join_layout(rank, world_size, torch.device("cpu"))
    engines = {
        "torch": lambda: DataParallelEngine(layout),
        "torch, fp16": lambda: DataParallelEngine(layout, torch.float16),
        "horovod": lambda: HorovodEngine(layout),
        "horovod, fp16": lambda: HorovodEngine(layout, torch.float16),
        "exact": lambda: ExactEngine(layout, all_reduce_over(layout.shards)),
        "exact, horovod": lambda: ExactEngine(layout, sum_over_horovod),
    }
    return engines[name]()


def _gradients(rank: int, world_size: int, names: tuple[str, ...]) -> list[list[float]]:
    """Return the gradients of the last of three steps with each engine, one engine after the other. The second step freezes a layer."""
    found = []
    for name in names:
        torch.manual_seed(rank)  # all ranks get the weights of rank 0
        module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        torch.manual_seed(1)
        rows = torch.randn(sum(SHARES), 5).split(SHARES)
        engine = engine_named(name, rank, world_size)
        model = engine.place(module)
        mine = assign(len(SHARES), world_size)[rank]
        for trains_all in (True, False, True):
            module.zero_grad(set_to_none=True)
            module[0].requires_grad_(trains_all)
            engine.begin_step(len(mine))
            for place in mine:
                is_last = place == mine[-1]
                engine.before_forward(is_last)
                loss = model(rows[place]).square().mean()
                engine.backward(loss, SHARES[place] / sum(SHARES), MicroBatch(0, place, 0, SHARES[place]), is_last)
            engine.finish_gradients(sum(SHARES), max_norm=None)
        found.append([value for parameter in module.parameters() for value in parameter.grad.flatten().tolist()])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_equal_those_of_the_torch_engine(world_size: int) -> None:
    """Five virtual workers with uneven shares give the ranks different numbers of backward passes."""
    names = ("torch", "horovod", "horovod, fp16", "torch, fp16", "exact", "exact, horovod")
    for by_engine in on_horovod_ranks(world_size, _gradients, names):
        plain, horovod, half, torch_half, exact, exact_horovod = map(torch.tensor, by_engine)
        torch.testing.assert_close(horovod, plain, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(half, plain, rtol=2e-3, atol=1e-5)
        torch.testing.assert_close(torch_half, plain, rtol=2e-3, atol=1e-5)
        assert exact_horovod.tolist() == exact.tolist()
        if world_size > 1:
            assert half.tolist() != plain.tolist()  # the gradients were compressed


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
    engine = engine_named("horovod", rank, world_size)
    model = engine.place(module)
    assert module.mask.tolist() == [True, False]
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        engine.begin_step(2 // world_size)
        for place in range(rank, 2, world_size):
            loss = model.parts[place](torch.ones(1, 3, dtype=torch.bfloat16)).sum().float()
            loss = loss + model.convolution(torch.ones(1, 2, 4, 4)).sum()
            engine.backward(loss, 1.0, MicroBatch(0, place, 0, 1), is_last=True)
        engine.finish_gradients(2, max_norm=None)
    return [None if parameter.grad is None else parameter.grad.flatten().tolist() for parameter in module.parameters()]


def test_a_gradient_that_some_ranks_lack_is_the_same_as_on_one_rank() -> None:
    (alone,) = on_horovod_ranks(1, _of_several_kinds)
    assert alone[4:6] == [None, None]
    assert None not in alone[:4] + alone[6:]
    for found in on_horovod_ranks(2, _of_several_kinds):
        assert found == alone


def _sparse(rank: int, world_size: int) -> None:
    layout = join_layout(rank, world_size, torch.device("cpu"))
    module = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(UsageError, match=r"a model with sparse gradients .* cannot be combined with engine=horovod"):
        make_engine(module, layout, "horovod", False, GradientSpec(), measures_noise=False, virtual_workers=1)


def test_sparse_gradients_are_refused_in_one_sentence() -> None:
    on_horovod_ranks(1, _sparse)


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
