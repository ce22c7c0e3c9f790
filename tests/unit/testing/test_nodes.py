"""Tests of the nodes of a local cluster, which are processes that do nothing here, without a head."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from undula.cluster.local import LocalCluster
from undula.errors import ClusterError
from undula.testing import nodes as module
from undula.testing.nodes import Nodes, _ray_start


class SilentHead:
    """Head that no node joins by itself."""

    def __init__(self, *arguments: object):
        self.joined: list[str] = []

    def ask(self, command: str) -> list[str]:
        return self.joined

    def drain(self, node: str, deadline: float) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Nodes that write their id to the file `started`."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$RAY_OVERRIDE_NODE_ID_FOR_TESTING" >> {tmp_path / "started"}\necho no head here\nexec sleep 600\n'
    )
    python.chmod(0o700)
    (tmp_path / "started").touch()
    (tmp_path / "session_latest").mkdir()
    monkeypatch.setattr(module, "Head", SilentHead)
    monkeypatch.setattr(module, "JOIN_LIMIT_S", 0.0)
    cluster = Nodes(LocalCluster("", "", {}, psutil.Process(), str(python), tmp_path), {})
    yield cluster
    cluster.close()


def await_starter(cluster: Nodes) -> None:
    """Wait until the nodes that were added have been started."""
    cluster._to_start.put(None)
    cluster._starter.join(30)
    assert not cluster._starter.is_alive()


def test_a_node_that_is_killed_just_before_its_processes_start_leaves_nothing(
    cluster: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill_meanwhile(local: LocalCluster, num_cpus: int, agents: Mapping[str, int]) -> list[str]:
        cluster.kill(cluster.nodes[0])
        return _ray_start(local, num_cpus, agents)

    monkeypatch.setattr(module, "_ray_start", kill_meanwhile)
    cluster.add()
    await_starter(cluster)
    assert cluster._processes == {}
    assert list(cluster._memory.iterdir()) == []
    assert (tmp_path / "started").read_text() == ""


def test_a_node_that_does_not_join_is_not_kept(cluster: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ATTEMPT_LIMIT_S", 0.3)
    node = cluster.add()
    await_starter(cluster)
    assert cluster._processes == {}
    assert cluster.nodes == []
    with pytest.raises(ClusterError, match=f"node {node[:8]} has not joined .* and 1 attempts: no head here"):
        cluster.await_all()
    cluster.await_all()  # the next test is not concerned
    cluster.kill(node)
    assert list(cluster._memory.iterdir()) == []


def join(cluster: Nodes) -> str:
    """Add a node and let it join."""
    cluster._head.joined.append(node := cluster.add())  # type: ignore[attr-defined]
    wait_until(lambda: node in cluster._joined)
    cluster.await_all()
    return node


def test_a_node_that_has_left_is_named_instead_of_awaited(cluster: Nodes) -> None:
    kept, lost = join(cluster), join(cluster)
    cluster._head.joined.remove(lost)  # type: ignore[attr-defined]
    assert cluster.leaving() == [lost]
    with pytest.raises(ClusterError, match=f"^nodes {lost[:8]} left the cluster .*; kill what has left$"):
        cluster.await_all()
    cluster.kill(lost)
    cluster.await_all()
    assert cluster.leaving() == []
    cluster.drain(kept, deadline_s=600)
    assert cluster.leaving() == [kept]


def test_a_wait_for_nodes_has_a_limit_and_names_them(cluster: Nodes) -> None:
    node = cluster.add()
    with pytest.raises(ClusterError, match=f"^nodes {node[:8]} did not join the cluster within 0 s$"):
        cluster.await_all(limit_s=0.0)
