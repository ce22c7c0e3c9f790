"""Tests under every kind of fault: the run has the same bits as a run without faults."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from chaos_kit import alone_for, assert_certified, command, events_in, origins_in, run_through, steps_of
from small_text import ENDLESS

from undula.state.events import CrashEvent
from undula.testing.faults import Action, Fault, parse_faults
from undula.testing.nodes import Nodes

STEPS = 100
"""Number of steps over which random faults are spread. A fault that waits for a rank takes place later."""
STEPS_AFTER = 10
SCHEDULE = """
at step 10: sigstop worker 1
at step 25: sigkill worker 0
at step 40: sigkill worker 1
at step 50: drain node 1 deadline 8
at step 55: add node
at step 80: kill node 0
at step 110: sigkill worker 0
"""

pytestmark = pytest.mark.timeout(900)


def assert_unchanged_by(
    faults: Sequence[Fault], spot: Nodes, text: str, runs: str, overrides: Sequence[str] = ()
) -> str:
    """Train under faults until all of them have taken place, compare the run with one without faults, and return its URL."""
    url = f"{runs}/chaos"
    # On a busy machine, snapshots that measure their own cost would be so rare that checkpoints are newer.
    settings = (*ENDLESS, "checkpoint.snapshot_every_steps=2", *overrides)
    chaos = run_through(faults, spot, command(text, runs, "chaos", *settings), url, STEPS_AFTER)
    assert len(chaos.injected) == len(faults)
    steps = steps_of(url)
    assert_certified(url, alone_for(steps, text, runs), steps)
    return url


def test_no_fault_changes_the_run(spot: Nodes, text: str, tmp_path: Path) -> None:
    url = assert_unchanged_by(parse_faults(SCHEDULE), spot, text, str(tmp_path))
    assert "hang" in [crash.cause for crash in events_in(url, CrashEvent)]
    assert {"the memory of a worker", "the memory of a node"} <= origins_in(url)


@pytest.mark.nightly
@pytest.mark.parametrize("overrides", [[], ["sharding.stage=3"]], ids=["whole", "sharded"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_faults_do_not_change_the_run(
    spot: Nodes, text: str, tmp_path: Path, seed: int, overrides: list[str]
) -> None:
    chance = random.Random(seed)
    faults: list[Fault] = []
    alive, added = [0, 1], 2
    for step in range(10, STEPS, 10):
        action = chance.choice([Action.SIGKILL, Action.SIGKILL, Action.SIGSTOP, Action.KILL])
        target, at_step = chance.randrange(2), step + chance.randrange(5)
        if action is not Action.KILL:
            faults.append(Fault(action, at_step=at_step, target=target))
            continue
        faults += [Fault(action, at_step=at_step, target=alive.pop(target)), Fault(Action.ADD, at_step=at_step)]
        alive.append(added)
        added += 1
    assert_unchanged_by(faults, spot, text, str(tmp_path), overrides)
