"""A model of which each rank has only a part: its state outlasts the ranks too."""

from pathlib import Path

import pytest
from chaos_kit import command, run_through, told, wrapped

from undula.report.certificate import certify, data_of
from undula.report.summary import read_run
from undula.storage import open_store
from undula.testing.faults import parse_faults
from undula.testing.nodes import Nodes

STEPS = 100
HOOK = """
from torch.distributed.fsdp import fully_shard

def prepared(module):
    for block in module.blocks:
        fully_shard(block)
    return fully_shard(module)
"""
SCHEDULE = """
at step 20: drain node 1 deadline 30
at step 25: add node
at step 50: sigkill worker 1
at step 75: kill node 0
"""

pytestmark = pytest.mark.timeout(400)


def test_a_sharded_model_moves_between_world_sizes_and_outlasts_lost_ranks(
    spot: Nodes, text: str, alone: str, tmp_path: Path
) -> None:
    settings = (f"plan.max_steps={STEPS}", "deterministic=false", "checkpoint.every_steps=1000")
    job = command(text, str(tmp_path), "sharded", *settings, script=wrapped(tmp_path, HOOK))
    chaos = run_through(parse_faults(SCHEDULE), spot, job, f"{tmp_path}/sharded")
    assert len(chaos.done) == 4
    run = read_run(open_store(f"{tmp_path}/sharded"))
    certificate = certify(run, data_of(run))
    assert certificate.holds, certificate.difference
    whole = read_run(open_store(alone)).ledger.steps["loss"].to_pylist()
    assert run.ledger.steps["loss"].to_pylist() == pytest.approx(whole[:STEPS], rel=2e-3)
    # There is no checkpoint before the last: what is lost with a rank is at the controller.
    assert "resumed from the memory of the head" in told(f"{tmp_path}/sharded")
    assert run.ledger.replaced.num_rows < STEPS / 2
