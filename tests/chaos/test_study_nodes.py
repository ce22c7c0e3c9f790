"""Test of a study on a cluster that loses a node: no trial fails, and every trial has the samples of its plan."""

from pathlib import Path
from typing import Any

import pytest
from chaos_kit import have_nodes
from study_kit import Studies
from waiting import wait_until

from undula.report.data.certificate import certify, data_of
from undula.report.data.run_record import read_run
from undula.state.ledger import read_ledger
from undula.storage import Store
from undula.study.records import OUTCOME, TRIALS
from undula.testing.nodes import Nodes


def under_way(trials: Store) -> list[str]:
    """Return the trials that have started and are not about to end."""
    found = []
    for name in {entry.name.partition("/")[0] for entry in trials.list()}:
        kinds = read_ledger(trials / name).events["kind"].to_pylist()
        if "start" in kinds and kinds.count("validation") < 8 and not (trials / name).exists(OUTCOME):
            found.append(name)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"packed": 1, "base_lrs": [1e-3, 1e-2]}, id="in-one-process"),
        pytest.param(
            {"base_lrs": [1e-2], "seeds": [0, 1], "samples": 24000, "overrides": {"workers.max": 2}},
            id="with-workers",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_lost_node_fails_no_trial(spot: Nodes, text: str, tmp_path: Path, keys: dict[str, Any]) -> None:
    have_nodes(spot, 2)
    studies = Studies(spot.cluster, text, tmp_path)
    driver = studies.start(studies.file("lost", **{"samples": 4800, "measurements": 10, **keys}))
    studies.await_outcomes(driver, "lost", 1)
    trials = studies.store("lost") / TRIALS
    on_all_nodes = len(spot.nodes) if "packed" in keys else 1  # a trial with workers has them on both nodes
    wait_until(lambda: len(under_way(trials)) >= on_all_nodes, 180, driver, interval_s=0.2)
    spot.kill(spot.nodes[-1])
    spot.add()
    out, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, out[-3000:]
    table = studies.table("lost")
    assert len(table) >= 4
    assert {row["state"] for row in table} == {"complete"}
    starts = []
    for row in table:
        run = read_run(studies.store("lost") / TRIALS / row["name"])
        assert certify(run, data_of(run)).holds
        starts.append(sum(event.kind == "start" for event in run.events))
    assert max(starts) > 1, "no trial was on the node that was lost"
