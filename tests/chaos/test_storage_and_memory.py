"""Tests of faults of a worker's disk and of its node's memory."""

from pathlib import Path

import psutil
import pytest
from chaos_kit import assert_certified, command, events_in, have_nodes, run_through, running, wrapped

from undula.recovery.snapshot import available_memory, slots_below
from undula.state.events import CrashEvent, SnapshotEvent, WarningEvent
from undula.storage import open_store
from undula.testing.nodes import Nodes, nodes

STEPS = 80
FULL_DISK = """
import resource

def before(step):
    limit = 1024 if 20 <= step.index < 59 else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
"""
GREEDY = """
import os, torch
from pathlib import Path

def before(step):
    marker = Path({marker!r})
    if step.index == 20 and not marker.exists():
        marker.touch()
        held = []
        while True:
            held.append(torch.ones(64 * 2**20, dtype=torch.uint8))
"""

pytestmark = pytest.mark.timeout(900)


@pytest.mark.nightly
def test_a_full_disk_fails_checkpoints_but_not_training(spot: Nodes, text: str, alone: str, tmp_path: Path) -> None:
    """From step 20 until the step before the checkpoint of step 60, no process of the run can write a file larger than 1 KiB."""
    settings = (f"plan.max_steps={STEPS}", "checkpoint.every_steps=15", "checkpoint.keep=10")
    job = command(text, str(tmp_path), "full", *settings, script=wrapped(tmp_path, FULL_DISK))
    run_through((), spot, job, f"{tmp_path}/full")
    assert_certified(f"{tmp_path}/full", alone, STEPS)
    assert "checkpoint_failed" in [warning.code for warning in events_in(f"{tmp_path}/full", WarningEvent)]
    saved = sorted(entry.name.split("/")[1] for entry in open_store(f"{tmp_path}/full").list("checkpoints"))
    assert {int(name.split("-")[1]) for name in saved} == {15, 60, 75, 80}


@pytest.mark.nightly
@pytest.mark.skipif(available_memory() < 12 * 2**30, reason="takes 6 GiB more than what runs already")
def test_a_worker_that_exhausts_the_memory_is_named_and_the_run_continues(
    text: str, alone: str, tmp_path: Path
) -> None:
    """Ray kills the worker before the machine is out of memory. The test sets its limit to 6 GiB above the current use."""
    total = psutil.virtual_memory().total
    share = (total - available_memory() + 6 * 2**30) / total
    watch = {"RAY_memory_usage_threshold": f"{share:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    hook = GREEDY.format(marker=str(tmp_path / "has-eaten"))
    job = command(text, str(tmp_path), "greedy", f"plan.max_steps={STEPS}", script=wrapped(tmp_path, hook))
    with nodes(node_env=watch) as spot:  # the head keeps the controller
        run_through((), spot, job, f"{tmp_path}/greedy")
    assert_certified(f"{tmp_path}/greedy", alone, STEPS)
    assert any("out of memory" in crash.error for crash in events_in(f"{tmp_path}/greedy", CrashEvent))


def test_two_ray_nodes_of_a_machine_take_their_snapshots_side_by_side(spot: Nodes, text: str, tmp_path: Path) -> None:
    have_nodes(spot, 2)
    first, second = (spot._memory / node for node in spot.nodes)
    second.rmdir()
    second.symlink_to(first)  # as without UNDULA_MEMORY, when both use /dev/shm
    with running(spot, text, tmp_path, 2, "workers.min=2", "workers.max=2") as job:
        job.wait_for(lambda: len(job.of(SnapshotEvent)) > 0)
        assert [warning.detail for warning in job.of(WarningEvent) if warning.code == "no_snapshots"] == []
        assert len({slot.parent for slot in slots_below(first)}) == 2
    for node in list(spot.nodes):
        spot.kill(node)
