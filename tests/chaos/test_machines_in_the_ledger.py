"""Labels of real nodes reach the ledger as Ray's launcher gives them to nodes, and become dollars."""

import json
from pathlib import Path

import pytest
from chaos_kit import command, run_through

from undula.cluster.prices import load_prices
from undula.report.cost import cost_of
from undula.report.summary import read_run
from undula.storage import open_store
from undula.testing.faults import parse_faults
from undula.testing.nodes import nodes

LABELS = {"undula.io/machine": "g6.xlarge", "undula.io/market": "spot", "ray.io/availability-region": "us-west-2"}
SCHEDULE = """
at step 10: kill node 1
at step 10: add node
"""

pytestmark = pytest.mark.timeout(300)


def test_what_waits_for_a_node_costs_dollars_too(text: str, tmp_path: Path) -> None:
    job = command(text, str(tmp_path), "priced", "plan.max_steps=30", "workers.min=2")
    with nodes(node_env={"RAY_OVERRIDE_LABELS": json.dumps(LABELS)}) as spot:
        run_through(parse_faults(SCHEDULE), spot, job, f"{tmp_path}/priced")
    run = read_run(open_store(f"{tmp_path}/priced"))
    told = [worker for event in run.events for worker in event.data.get("workers", ())]
    assert {event.kind for event in run.events if event.data.get("workers")} == {"group", "waiting"}
    assert {(worker["machine"], worker["market"], worker["region"]) for worker in told} == {
        ("g6.xlarge", "spot", "us-west-2")
    }
    found = cost_of(run, lambda events: load_prices())
    assert found
    assert found.unpriced == ()
    assert found.dollars["useful"] > 0
    assert found.dollars["capacity"] > 0
    assert found.saved == pytest.approx(1 - 0.4307 / 0.8048)
