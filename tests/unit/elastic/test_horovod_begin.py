"""Tests of Horovod with real ranks, one of which was in another group before."""

import socket
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from horovod_ranks import meeting_place, rank_variables
from ranks import on_ranks

from undula.elastic.pure.spec import HorovodSpec
from undula.elastic.ray.horovod import begin, places
from undula.recovery.worker_state import WorkerState

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make horovod")
MIB_OF_FLOATS = 2**18
BOTH = {"fusion_threshold_mib": 2, "cycle_time_ms": 2}


def _with_a_former_rank(rank: int, world_size: int, former: int, by_rank: list[dict[str, str]]) -> list[float]:
    """Reduce 3 MiB three times on two ranks, one of which was in another group. From the second time on, ranks fuse cached tensors."""
    import horovod.torch as hvd

    state = WorkerState()
    if rank == former:
        begin({**by_rank[rank], **places(["alone"])[0]}, state)
        hvd.shutdown()
    begin(by_rank[rank], state)
    gradients = [torch.full((MIB_OF_FLOATS // 4,), float(number)) for number in range(12)]
    for _ in range(3):
        dist.barrier()
        handles = [
            hvd.allreduce_async_(gradient, op=hvd.Sum, name=str(number)) for number, gradient in enumerate(gradients)
        ]
        for handle in handles:
            hvd.synchronize(handle)
    hvd.shutdown()
    return [float(gradient.mean()) for gradient in gradients]


@pytest.mark.parametrize(("former", "fields"), [(0, {}), (1, {}), (0, {"fusion_threshold_mib": 2})])
def test_a_process_from_an_earlier_group_fuses_the_same_tensors_as_a_new_one(
    former: int, fields: dict[str, Any]
) -> None:
    with meeting_place() as server:
        sums = on_ranks(2, _with_a_former_rank, former, rank_variables(server, 2, HorovodSpec(**fields)))
    assert sums == [[8.0 * number for number in range(12)]] * 2


def _late(rank: int, world_size: int, by_rank: list[dict[str, str]], limit_s: float) -> list[float]:
    """Reduce a tensor on two ranks, one of which computes for longer than Horovod's time limit before."""
    import horovod.torch as hvd

    begin(by_rank[rank], WorkerState())
    until = time.monotonic() + (2.5 * limit_s if rank == 0 else 0.0)
    while time.monotonic() < until:
        torch.rand(100).sum()
    total = hvd.allreduce(torch.ones(2), op=hvd.Sum)
    hvd.shutdown()
    return [float(value) for value in total]


def test_horovod_waits_for_a_rank_that_computes_for_longer_than_its_timeout() -> None:
    with meeting_place() as server:
        variables = rank_variables(server, 2, HorovodSpec(timeout_s=1))
        assert on_ranks(2, _late, variables, 1.0) == [[2.0, 2.0]] * 2


def _new_connections(rank: int, world_size: int, by_rank: list[dict[str, str]]) -> list[str]:
    """Return the local addresses of the connections that Horovod has made."""
    import horovod.torch as hvd

    def addresses() -> list[str]:
        connections = psutil.Process().net_connections("tcp")
        return [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_ESTABLISHED]

    state = WorkerState()
    before = addresses()
    begin(by_rank[rank], state)
    hvd.allreduce(torch.ones(1), name="one")
    new = addresses()
    dist.barrier()  # otherwise another rank may close its end of them
    hvd.shutdown()
    for address in before:
        new.remove(address)
    return new


def test_gradients_use_the_requested_network_interface() -> None:
    """By default, Horovod would use the interface of the host's name, which is often the loopback interface."""
    outer = {name: all_of[0].address for name, all_of in psutil.net_if_addrs().items() if _is_outer(all_of[0])}
    if not outer:
        pytest.skip("this machine has only a loopback interface")
    name, address = next(iter(outer.items()))
    with meeting_place() as server:
        by_rank = [{**variables, "HOROVOD_GLOO_IFACE": name} for variables in rank_variables(server, 2, HorovodSpec())]
        addresses = on_ranks(2, _new_connections, by_rank)
    assert all(addresses)
    assert {address_of_end.removeprefix("::ffff:") for end in addresses for address_of_end in end} == {address}


def _is_outer(address: Any) -> bool:
    return address.family == socket.AF_INET and not address.address.startswith("127.")


def _is_spent(rank: int, world_size: int, fields: dict[str, Any]) -> bool:
    import horovod.torch as hvd

    state = WorkerState()
    begin({**HorovodSpec(**fields).variables("1", has_gpus=False), **places(["alone"])[0]}, state)
    hvd.shutdown()
    return state.is_spent


@pytest.mark.parametrize(
    ("fields", "is_spent"),
    [({}, False), ({"fusion_threshold_mib": 2}, False), (BOTH, True), ({"autotune": True}, True)],
)
def test_a_process_whose_horovod_cannot_restart_joins_no_other_group(fields: dict[str, Any], is_spent: bool) -> None:
    """If both parameters are fixed, a second `hvd.init()` ends the process with SIGSEGV."""
    assert on_ranks(1, _is_spent, fields) == [is_spent]
