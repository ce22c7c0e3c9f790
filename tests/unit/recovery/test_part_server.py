"""Parts of a state that a worker serves to others."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from undula.recovery import part_server
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
    with pytest.raises(ConnectionError):
        client.fetch([("model.count", ((), ()))])


def test_parts_of_a_state_that_is_gone_are_refused(server: PartServer, held: list[RankState]) -> None:
    held.clear()
    with pytest.raises(OSError, match="404"):
        PartClient(server.address).fetch([("model.count", ((), ()))])


def test_a_server_that_has_ended_is_an_error(server: PartServer) -> None:
    server.close()
    with pytest.raises(OSError, match="refused"):
        PartClient(server.address).fetch([("model.count", ((), ()))])


def test_a_header_that_is_not_ascii_ends_the_connection(server: PartServer) -> None:
    with socket.create_connection((server.address.host, server.address.port)) as connection:
        connection.sendall(
            "POST / HTTP/1.1\r\nAuthorization: Bearer \u00e9\r\nContent-Length: 0\r\n\r\n".encode("latin-1")
        )
        assert ended(connection)


def ended(connection: socket.socket) -> bool:
    """Return whether the server has closed a connection, or does so soon."""
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_without_the_token_take_no_thread_and_end(
    server: PartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_server, "TOKEN_S", 0.5)
    before = threading.active_count()
    place = server.address.host, server.address.port
    silent = [socket.create_connection(place) for _ in range(100)]
    trickling = socket.create_connection(place)
    trickling.sendall(b"POST / HTTP/1.1\r\nX: ")
    assert len(PartClient(server.address).fetch([("model.count", ((), ()))])) == 64
    assert threading.active_count() <= before + 1  # that of the fetch
    assert all(map(ended, [*silent, trickling]))


def test_more_connections_than_fit_end_the_oldest(server: PartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartServer, "request_queue_size", 3)
    place = server.address.host, server.address.port
    connections = [socket.create_connection(place) for _ in range(4)]
    assert ended(connections[0])
    assert len(PartClient(server.address).fetch([("model.count", ((), ()))])) == 64


def test_a_token_may_come_in_pieces(server: PartServer) -> None:
    with socket.create_connection((server.address.host, server.address.port)) as connection:
        head = f"POST / HTTP/1.1\r\nAuthorization: Bearer {server.address.token}\r\nContent-Length: 2\r\n\r\n[]"
        for piece in (head[:30], head[30:60], head[60:]):
            connection.sendall(piece.encode())
            time.sleep(2 * part_server.POLL_S)
        assert b" 200 " in connection.recv(1000)


def test_a_server_that_is_closed_ends_connections_without_the_token(server: PartServer) -> None:
    with socket.create_connection((server.address.host, server.address.port)) as connection:
        connection.sendall(b"POST")
        server.close()
        assert ended(connection)


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
