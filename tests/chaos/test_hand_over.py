"""Test that a worker with a large state survives the loss of another one."""

from pathlib import Path

import pytest
from chaos_kit import command, events_in, origins_in, run_through, wrapped

from undula.state.events import CrashEvent
from undula.state.ledger import read_ledger
from undula.storage import open_store
from undula.testing.faults import parse_faults
from undula.testing.nodes import Nodes

STEPS = 40
HOOK = """
from undula.state.pieces import RankState

on_host = RankState.on_host

def before(step):
    def in_20_parts(state, copied):
        for _ in range(20):
            time.sleep(1)
            copied()
        return on_host(state, copied)
    RankState.on_host = in_20_parts
"""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def test_a_worker_that_copies_its_state_for_long_keeps_it(spot: Nodes, text: str, tmp_path: Path) -> None:
    settings = (f"plan.max_steps={STEPS}", "workers.min=1", "workers.grow=never")
    job = command(text, str(tmp_path), "large", *settings, script=wrapped(tmp_path, HOOK))
    run_through(parse_faults("at step 15: sigkill worker 1"), spot, job, f"{tmp_path}/large")
    assert "unusable" not in [crash.cause for crash in events_in(f"{tmp_path}/large", CrashEvent)]
    assert origins_in(f"{tmp_path}/large") == {None, "the memory of a worker"}
    ledger = read_ledger(open_store(f"{tmp_path}/large"))
    assert ledger.steps["step"].to_pylist() == list(range(STEPS))
    assert ledger.replaced.num_rows == 0
