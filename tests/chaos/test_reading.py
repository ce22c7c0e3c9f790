"""Tests of reading with Ray Data under stress: every rank has exactly its samples, its memory is bounded, and nothing blocks for ever."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos_kit import have_nodes
from reading_kit import Place, RankFound, Reading, readers, write_rows
from waiting import wait_until

from undula.cluster.local import local_cluster
from undula.testing.nodes import Nodes

pytestmark = pytest.mark.timeout(900)
PLAN = {"global_batch": 96, "virtual_workers": 6, "window": 3, "epochs": 2}
SMALL_TASKS = {"prefetch_mib": 1, "read_tasks": 2}
"""A task of about two windows of 150 rows of a kilobyte."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of 3000 rows of a kilobyte in row groups of 50 rows."""
    return write_rows(tmp_path_factory.mktemp("reading"), 3000, 1000, 50)


def two_nodes(spot: Nodes) -> tuple[str, str]:
    """Start or kill nodes until the cluster has two, and return their ids."""
    have_nodes(spot, 2)
    first, second = spot.nodes
    return first, second


def assert_exact(reading: Reading, found: Sequence[RankFound | None], lost: Sequence[int] = ()) -> None:
    for number, rank in enumerate(found):
        assert (rank is None) == (number in lost)
        assert rank is None or rank.steps == reading.expected(number)


def head(spot: Nodes) -> str:
    wait_until(lambda: len(set(spot.alive()) - set(spot.nodes)) == 1)  # until Ray has noticed that a node was killed
    return (set(spot.alive()) - set(spot.nodes)).pop()


@pytest.mark.nightly
def test_the_loss_of_another_node_does_not_concern_the_read_tasks_of_a_rank(
    spot: Nodes, url: str, tmp_path: Path
) -> None:
    kept, lost = two_nodes(spot)
    places = [Place(kept, slow_s=0.02), Place(lost, slow_s=0.02)]
    reading = Reading(url, PLAN, places, str(tmp_path), SMALL_TASKS, mapped=True)
    with readers(spot.cluster, reading) as running:
        running.wait_for_steps(0, 10)
        running.wait_for_steps(1, 10)
        spot.kill(lost)
        found = running.finish()
    assert_exact(reading, found, lost=[1])
    assert found[0] is not None
    assert found[0].nodes == [kept]


def test_a_node_lost_in_the_middle_of_a_read_task_costs_no_sample(spot: Nodes, url: str, tmp_path: Path) -> None:
    """The tasks reserve CPUs, so they run on nodes other than the ranks'."""
    two_nodes(spot)
    reserved: dict[str, Any] = {**SMALL_TASKS, "read_cpus": 1.0}
    places = [Place(head(spot)), Place(head(spot))]
    reading = Reading(url, PLAN, places, str(tmp_path), reserved, mapped=True, held=1000 + 1717, patience_s=1.0)
    (tmp_path / "hold").touch()
    with readers(spot.cluster, reading) as running:
        running.wait_for(lambda: any(tmp_path.glob("held-*")))
        (held,) = tmp_path.glob("held-*")
        spot.kill(held.name.removeprefix("held-"))
        (tmp_path / "hold").unlink()
        found = running.finish()
    assert_exact(reading, found)


def test_ranks_in_lockstep_read_on_while_workers_and_other_tasks_hold_all_cpus(
    spot: Nodes, url: str, tmp_path: Path
) -> None:
    """There is one CPU for the tasks of both ranks. A task holds it until its rows are taken, which the other rank delays."""
    worker, _ = two_nodes(spot)
    places = [Place(worker, num_cpus=0.5), Place(worker, num_cpus=0.5)]
    reserved: dict[str, Any] = {**SMALL_TASKS, "read_cpus": 1.0}
    reading = Reading(url, PLAN, places, str(tmp_path), reserved, in_lockstep=True, patience_s=1.0)
    with readers(spot.cluster, reading) as running:
        assert_exact(reading, running.finish())


@pytest.mark.nightly
def test_a_slow_rank_keeps_its_read_ahead_within_its_limit(spot: Nodes, tmp_path: Path) -> None:
    read_beside_a_slow_rank(spot, tmp_path, rows=1600, slow_s=0.03)


@pytest.mark.nightly
def test_a_slow_rank_keeps_its_read_ahead_within_its_limit_for_a_minute(spot: Nodes, tmp_path: Path) -> None:
    read_beside_a_slow_rank(spot, tmp_path, rows=9600, slow_s=0.15)


def read_beside_a_slow_rank(spot: Nodes, tmp_path: Path, rows: int, slow_s: float) -> None:
    """Let two ranks, one of them slow, read far more data than they may read ahead."""
    nodes = two_nodes(spot)
    large = write_rows(tmp_path / "large", rows, 50_000, 40)
    plan = {"global_batch": 24, "virtual_workers": 2, "window": 2, "epochs": 1}
    places = [Place(nodes[0], slow_s=slow_s), Place(nodes[1])]
    reading = Reading(large, plan, places, str(tmp_path), {"prefetch_mib": 8, "read_tasks": 2})
    with readers(spot.cluster, reading) as running:
        found = running.finish()
        # For each rank: the prefetch, the rows of two tasks of 4 MiB, and the windows in use.
        assert running.most_stored_mib() < 2 * (8 + 2 * 4 + 2 * 4)
    assert_exact(reading, found)
    assert_flat(found)


def assert_flat(found: Sequence[RankFound | None]) -> None:
    """Check that the memory of the ranks does not grow after the first quarter of the steps."""
    for rank in found:
        assert rank is not None
        quarter = len(rank.resident_mib) // 4
        assert max(rank.resident_mib[quarter:]) < max(rank.resident_mib[:quarter]) + 16


@pytest.mark.nightly
def test_ranks_read_on_while_node_after_node_is_lost(spot: Nodes, tmp_path: Path) -> None:
    """Tasks that reserve CPUs run on nodes other than the ranks'. A node is lost after each tenth of the steps."""
    two_nodes(spot)
    large = write_rows(tmp_path / "large", 12_000, 1000, 50)
    places = [Place(head(spot), slow_s=0.2), Place(head(spot), slow_s=0.2)]
    reserved: dict[str, Any] = {**SMALL_TASKS, "read_cpus": 1.0}
    reading = Reading(large, PLAN, places, str(tmp_path), reserved)
    with readers(spot.cluster, reading) as running:
        for tenth in range(1, 10):
            running.wait_for_steps(0, tenth * 25)
            spot.kill(spot.nodes[0])
            spot.add()
        found = running.finish()
    assert_exact(reading, found)


@pytest.mark.nightly
def test_ranks_whose_object_store_spills_have_exact_samples_and_flat_memory(
    forking_python: str, tmp_path: Path
) -> None:
    """The ranks may read ahead far more than the object store holds, and are too slow to take it."""
    with local_cluster(num_cpus=2, object_store_bytes=80 * 2**20, python=forking_python) as small:
        files = Path(small.env["RAY_AUTH_TOKEN_PATH"]).parent
        large = write_rows(tmp_path / "large", 600, 10**6, 10)
        plan = {"global_batch": 12, "virtual_workers": 4, "window": 2, "epochs": 2}
        reading = Reading(large, plan, [Place(None, slow_s=0.3)] * 2, str(tmp_path), {"prefetch_mib": 400})
        with readers(small, reading) as running:
            running.wait_for(lambda: running.has_ended() or any(files.glob("**/ray_spilled_objects*/*")))
            assert not running.has_ended()
            found = running.finish()
    assert_exact(reading, found)
    assert_flat(found)
