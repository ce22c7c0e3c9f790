"""Tests of the choice of a network interface, and of the test that ranks reach each other over it."""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from undula.elastic.network import GLOO, NCCL, check_connection, gloo_address, use_interface
from undula.errors import ClusterError


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment in which no interface is set, which is restored."""
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def store() -> Store:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


def test_the_interface_with_the_address_of_the_node_is_used() -> None:
    use_interface(None, "127.0.0.1")
    assert (os.environ[GLOO], os.environ[NCCL]) == ("lo", "=lo")
    assert gloo_address() == ("127.0.0.1", "of the interface lo")


def test_the_interface_of_the_environment_stays_unless_the_job_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "ib7")
    use_interface(None, "127.0.0.1")
    assert (os.environ[GLOO], os.environ[NCCL]) == ("ib7", "=lo")
    use_interface(("none0", "lo"), "10.9.9.9")
    assert (os.environ[GLOO], os.environ[NCCL]) == ("lo", "=none0,lo")
    with pytest.raises(
        ClusterError, match=r"no network interface ib0 or ib1; set workers\.interfaces .*\(here: .*lo.*\)"
    ):
        use_interface(("ib0", "ib1"), "127.0.0.1")


def test_an_address_of_no_interface_leaves_the_choice_to_gloo() -> None:
    use_interface(None, "203.0.113.9")
    assert GLOO not in os.environ
    address, what = gloo_address()
    assert socket.inet_aton(address)
    assert what == f"of the name {socket.gethostname()}"


def test_ranks_that_reach_each_other_begin(store: Store) -> None:
    use_interface(None, "127.0.0.1")
    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(lambda rank: check_connection(store, rank, 3, f"node {rank}"), range(3)))


def test_all_ranks_name_the_connection_that_fails(store: Store) -> None:
    use_interface(None, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.set("at/1", json.dumps(["127.0.0.1", port, "of the interface eth9 of node b"]))
    store.set("reaches/1", "")
    expected = r"^node a does not reach 127\.0\.0\.1, the address of the interface eth9 of node b: Connection refused; set workers"
    with pytest.raises(ClusterError, match=expected):
        check_connection(store, 0, 2, "a")


def test_a_rank_that_reaches_the_next_one_names_what_others_do_not(store: Store) -> None:
    use_interface(None, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.set("at/1", json.dumps(["127.0.0.1", listener.getsockname()[1], ""]))
        store.set("reaches/1", "node b does not reach node a")
        with pytest.raises(ClusterError, match=r"^node b does not reach node a$"):
            check_connection(store, 0, 2, "a")
