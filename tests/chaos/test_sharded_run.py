"""Tests of a sharded model under faults: its state survives lost ranks."""

from pathlib import Path

import pytest
from alone import train_alone
from chaos_kit import SCRIPT, command, events_in, origins_in, run_through, wrapped

from undula.report.data.certificate import certify, data_of
from undula.report.data.run_record import read_run
from undula.state.events import CrashEvent, LostEvent
from undula.storage import open_store
from undula.testing.faults import parse_faults
from undula.testing.nodes import Nodes

STEPS = 80
HOOK = """
from torch.distributed.fsdp import fully_shard

def prepared(module):
    for block in module.blocks:
        fully_shard(block)
    return fully_shard(module)
"""
AWAITED = """
def before(step):
    if step._layout.world_size == 1 and 15 < step.index < 60:
        time.sleep(3)  # until the second rank has joined, for which the faults wait
"""
STALL = """
def before(step):
    if step.index == 20 and step._layout.rank == 1:
        reader = step._batches._batches._reader
        take = reader.take
        def late(*arguments):
            time.sleep(12)
            reader.take = take
            return take(*arguments)
        reader.take = late
"""
SCHEDULE = """
at step 10: drain node 1 deadline 30
at step 15: add node
at step 35: sigkill worker 1
at step 60: kill node 0
"""

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("hook", "sharding"),
    [
        pytest.param(AWAITED, ["sharding.stage=3"], id="by the platform"),
        pytest.param(HOOK + AWAITED, [], id="by the script", marks=pytest.mark.nightly),
    ],
)
def test_a_sharded_model_survives_resizes_and_lost_ranks_with_the_bits_of_a_whole_one(
    spot: Nodes, text: str, tmp_path: Path, hook: str, sharding: list[str]
) -> None:
    settings = (f"plan.max_steps={STEPS}", "checkpoint.every_steps=1000")
    job = command(text, str(tmp_path), "sharded", *settings, *sharding, script=wrapped(tmp_path, hook, pace_s=0.3))
    chaos = run_through(parse_faults(SCHEDULE), spot, job, f"{tmp_path}/sharded")
    assert len(chaos.injected) >= 3
    # No checkpoint is written before the end, so the state of a lost rank comes from the copy at the controller.
    assert any("the memory of the head" in (origin or "") for origin in origins_in(f"{tmp_path}/sharded"))

    whole = train_alone(command(text, str(tmp_path), "whole", *settings, script=SCRIPT))
    run, alone = read_run(open_store(f"{tmp_path}/sharded")), read_run(whole)
    certificate = certify(run, data_of(run), against=alone)
    assert certificate.holds, certificate.difference
    # Only the killed node costs steps. The notice, the growths and the killed process cost none.
    lost = events_in(f"{tmp_path}/sharded", LostEvent)
    assert run.ledger.replaced.num_rows <= sum(event.steps for event in lost)
    assert all(event.step + event.steps >= 60 for event in lost)


@pytest.mark.nightly
def test_ranks_that_wait_for_one_without_data_are_not_lost(spot: Nodes, text: str, tmp_path: Path) -> None:
    settings = ("plan.max_steps=30", "workers.min=2")
    job = command(text, str(tmp_path), "stalled", *settings, script=wrapped(tmp_path, HOOK + STALL))
    run_through([], spot, job, f"{tmp_path}/stalled")
    assert events_in(f"{tmp_path}/stalled", CrashEvent) == []
