"""Tests under every kind of fault: the run has the same bits as a run without faults."""

import random
from pathlib import Path

import pytest
from chaos_kit import SCHEDULED_STEPS, assert_certified, command, events_in, origins_in, run_through

from undula.state.events import CrashEvent
from undula.testing.faults import Fault, parse_faults
from undula.testing.nodes import Nodes

STEPS = 100
# A fault of worker 1 after another fault waits for a group with a second rank, which may come too late on a slow machine.
WAITS = "at step 40: sigkill worker 1"
SCHEDULE = f"""
at step 10: sigstop worker 1
at step 25: sigkill worker 0
{WAITS}
at step 50: drain node 1 deadline 8
at step 55: add node
at step 80: kill node 0
at step 110: sigkill worker 0
"""

pytestmark = pytest.mark.timeout(400)


def test_no_fault_changes_the_run(spot: Nodes, text: str, alone: str, tmp_path: Path) -> None:
    url = f"{tmp_path}/chaos"
    job = command(text, str(tmp_path), "chaos", f"plan.max_steps={SCHEDULED_STEPS}")
    chaos = run_through(parse_faults(SCHEDULE), spot, job, url)
    assert {str(fault) for fault in chaos.pending} <= {WAITS}
    assert_certified(url, alone, SCHEDULED_STEPS)
    assert "hang" in [crash.cause for crash in events_in(url, CrashEvent)]
    assert {"the memory of a worker", "the memory of a node"} <= origins_in(url)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_faults_do_not_change_the_run(spot: Nodes, text: str, alone: str, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    faults: list[Fault] = []
    alive, added = [0, 1], 2
    for step in range(10, STEPS, 10):
        action = chance.choice(["sigkill", "sigkill", "sigstop", "kill"])
        target, at_step = chance.randrange(2), step + chance.randrange(5)
        if action != "kill":
            faults.append(Fault(action, at_step=at_step, target=target))  # type: ignore[arg-type]
            continue
        faults += [Fault("kill", at_step=at_step, target=alive.pop(target)), Fault("add", at_step=at_step)]
        alive.append(added)
        added += 1
    job = command(text, str(tmp_path), "chaos", f"plan.max_steps={STEPS}")
    chaos = run_through(faults, spot, job, f"{tmp_path}/chaos")
    # A signal waits for a group with that rank, which may not exist before the last step.
    assert len(chaos.injected) >= len(faults) - 2
    assert_certified(f"{tmp_path}/chaos", alone, STEPS)
