"""The server where Horovod's ranks meet, asked as Horovod's client asks it."""

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from undula.elastic.rendezvous import RendezvousServer


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    running = RendezvousServer("127.0.0.1", key="mine")
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


def test_what_one_rank_leaves_another_finds(server: RendezvousServer) -> None:
    group = server.begin_group()
    assert ask(group, "GET", "global/0") is None
    assert ask(group, "PUT", "global/0", b"\x00address") == b""
    assert ask(group, "GET", "global/0") == b"\x00address"
    assert ask(group, "GET", "local_host/0") is None


def test_without_the_groups_secret_nothing_is_there(server: RendezvousServer) -> None:
    former = server.begin_group()
    ask(former, "PUT", "global/0", b"old")
    group = server.begin_group()
    assert "/mine" in group["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    assert ask(group, "GET", "global/0") is None
    ask(group, "PUT", "global/0", b"new")
    host, _, secret = group["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")
    for stranger in (former, {**group, "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{host}/{secret[:-1]}"}):
        assert ask(stranger, "PUT", "global/0", b"evil") is None
        assert ask(stranger, "GET", "global/0") is None
    assert ask(group, "GET", "global/0") == b"new"
