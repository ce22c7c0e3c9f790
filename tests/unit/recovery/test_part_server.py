"""Parts of a state that a worker serves to others."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from undula.recovery.moves import unpack_parts
from undula.recovery.part_server import PartClient, PartServer
from undula.state.pieces import Piece, RankState, piece_of

WEIGHT = torch.arange(24, dtype=torch.float32).view(6, 4)
STATE = RankState({"model.weight": piece_of(WEIGHT), "model.count": piece_of(torch.tensor(7))}, {})


@pytest.fixture
def held() -> list[RankState]:
    return [STATE]


@pytest.fixture
def server(held: list[RankState]) -> Iterator[PartServer]:
    server = PartServer("127.0.0.1", lambda: held)
    yield server
    server.close()


def test_parts_arrive_as_they_are_held(server: PartServer) -> None:
    parts = [("model.weight", ((2, 0), (3, 4))), ("model.count", ((), ()))]
    targets = {
        "model.weight": Piece(torch.zeros(3, 4), (6, 4), (2, 0)),
        "model.count": piece_of(torch.tensor(0)),
    }
    client = PartClient(server.address)
    for _ in range(2):  # over one connection
        dtypes = {"model.weight": torch.float32, "model.count": torch.int64}
        unpack_parts(client.fetch(parts), parts, targets, dtypes)
        assert torch.equal(targets["model.weight"].tensor, WEIGHT[2:5])
        assert targets["model.count"].tensor == 7
        targets["model.weight"].tensor.zero_()
    client.close()


def test_a_request_without_the_token_gets_nothing(server: PartServer) -> None:
    client = PartClient(replace(server.address, token="guessed"))
    with pytest.raises(OSError, match="401"):
        client.fetch([("model.count", ((), ()))])


def test_parts_of_a_state_that_is_gone_are_refused(server: PartServer, held: list[RankState]) -> None:
    held.clear()
    with pytest.raises(OSError, match="404"):
        PartClient(server.address).fetch([("model.count", ((), ()))])


def test_a_server_that_has_ended_is_an_error(server: PartServer) -> None:
    server.close()
    with pytest.raises(OSError, match="refused"):
        PartClient(server.address).fetch([("model.count", ((), ()))])


def test_a_header_that_is_not_ascii_is_answered(server: PartServer) -> None:
    with socket.create_connection((server.address.host, server.address.port)) as connection:
        connection.sendall(
            "POST / HTTP/1.1\r\nAuthorization: Bearer \u00e9\r\nContent-Length: 0\r\n\r\n".encode("latin-1")
        )
        assert b" 401 " in connection.recv(1000)


def test_a_server_that_is_closed_serves_open_connections_nothing_more(server: PartServer) -> None:
    client, parts = PartClient(server.address), [("model.count", ((), ()))]
    client.fetch(parts)
    server.close()
    with pytest.raises(OSError, match="404"):
        client.fetch(parts)


def test_a_server_has_addresses_of_both_kinds() -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    server = PartServer("::1", lambda: [STATE])
    assert len(PartClient(server.address).fetch([("model.count", ((), ()))])) == 64
    server.close()
