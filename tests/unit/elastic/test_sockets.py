"""Tests that a rank that waits for a lost one is woken, both in a collective and in a rendezvous."""

import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from undula.cluster.local import free_ports
from undula.elastic.sockets import cut_connections, listening_ports

LIMIT_S = 20.0


def _collective(rank: int, world_size: int, folder: str) -> float | None:
    """Run a ring in which rank 2 is lost. Its neighbours notice this but stay alive, and rank 0 waits for them."""
    numbers = torch.ones(2_000_000)
    dist.all_reduce(numbers)
    if rank == 2:
        return None
    began = time.monotonic()
    threading.Timer(1.0, lambda: cut_connections(listening_ports())).start()
    with pytest.raises(RuntimeError, match="onnection"):
        _reduce_often(numbers)
    waited = time.monotonic() - began
    (Path(folder) / str(rank)).touch()
    while len(list(Path(folder).iterdir())) < world_size - 1 and time.monotonic() - began < LIMIT_S:
        time.sleep(0.1)  # limits the polling rate
    return waited


def _reduce_often(numbers: torch.Tensor) -> None:
    for _ in range(9):  # the first reduction may succeed
        dist.all_reduce(numbers)


def test_a_rank_that_waits_in_a_collective_is_woken(tmp_path: Path) -> None:
    waited = on_ranks(4, _collective, str(tmp_path))
    assert waited[2] is None
    assert max(seconds for seconds in waited if seconds is not None) < LIMIT_S / 2


def _rendezvous(rank: int, world_size: int, port: int) -> float:
    """Wait for a third rank, which never comes."""
    began = time.monotonic()
    own = listening_ports()
    threading.Timer(1.0, lambda: cut_connections(listening_ports() - own)).start()
    with pytest.raises(dist.DistError):
        _wait_for_a_third(port, is_master=rank == 0)
    return time.monotonic() - began


def _wait_for_a_third(port: int, is_master: bool) -> None:
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=is_master, timeout=timedelta(seconds=LIMIT_S))
    store.get("address of rank 2")


def test_ranks_that_wait_in_a_rendezvous_are_woken() -> None:
    assert max(on_ranks(2, _rendezvous, free_ports(1)[0])) < LIMIT_S / 2


def test_only_sockets_opened_since_then_are_shut_down() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())
        with server.accept()[0] as accepted:
            cut_connections(listening_ports() - {server.getsockname()[1]})
            client.send(b"a")
            assert accepted.recv(1) == b"a"
            cut_connections(listening_ports())
            assert client.recv(1) == b""
