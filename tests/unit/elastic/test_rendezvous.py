"""Tests of the rendezvous server of Horovod's ranks, with requests like those of Horovod's client."""

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from undula.elastic.rendezvous import RendezvousServer


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    running = RendezvousServer("127.0.0.1", key="mine/and:yours=")
    yield running
    running.shutdown()
    running.server_close()


def ask(variables: dict[str, str], method: str, key: str, body: bytes | None = None) -> bytes | None:
    address, port = variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"], variables["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    request = urllib.request.Request(f"http://{address}:{port}/{key}", body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        return None if error.code == 404 else pytest.fail(str(error))


def test_values_of_one_rank_can_be_read_by_another(server: RendezvousServer) -> None:
    group = server.begin_group()
    assert ask(group, "GET", "global/0") is None
    assert ask(group, "PUT", "global/0", b"\x00address") == b""
    assert ask(group, "GET", "global/0") == b"\x00address"
    assert ask(group, "GET", "local_host/0") is None


def test_requests_without_the_secret_of_the_group_find_nothing(server: RendezvousServer) -> None:
    former = server.begin_group()
    ask(former, "PUT", "global/0", b"old")
    group = server.begin_group()
    assert "mine" not in group["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    assert ask(group, "GET", "global/0") is None
    ask(group, "PUT", "global/0", b"new")
    host, _, secret = group["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")
    for stranger in (former, {**group, "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{host}/{secret[:-1]}"}):
        assert ask(stranger, "PUT", "global/0", b"evil") is None
        assert ask(stranger, "GET", "global/0") is None
    assert ask(group, "GET", "global/0") == b"new"


def test_requests_that_are_too_large_or_unauthenticated_are_refused(server: RendezvousServer) -> None:
    group = server.begin_group()
    host, _, secret = group["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")
    address, port = host.split(":")
    for path, length, status in ((f"/{secret}:x/a", 10**12, 413), (f"/{secret}:x/a", -1, 413), ("/a", 10**12, 404)):
        with socket.create_connection((address, int(port)), timeout=10) as stranger:
            stranger.sendall(f"PUT {path} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
            assert f" {status} ".encode() in stranger.recv(100)
    assert not server.values
