"""Horovod's own elastic scenarios (test/integration/elastic_common.py), rewritten: they give the bits of a torch run without faults."""

import sys
from pathlib import Path

import pytest
from chaos_kit import (
    SCHEDULED_STEPS,
    SCRIPT,
    assert_certified,
    command,
    events_in,
    have_nodes,
    origins_in,
    run_through,
    waits_for_one_worker,
    wrapped,
)
from jobs_kit import relative_difference

from undula.data.prepare.corpora import stdlib_text
from undula.report.data.certificate import certify, data_of
from undula.report.data.run_record import read_run
from undula.state.events import CrashEvent, StartEvent, WaitingEvent
from undula.storage import open_store
from undula.testing.chaos import Chaos, start_driver
from undula.testing.faults import parse_faults
from undula.testing.nodes import Nodes

STEPS = 60
BRIEF = """
at step 10: sigkill worker 1
at step 25: drain node 1 deadline 8
at step 30: add node
at step 45: sigkill worker 0
at step 45: sigkill worker 1
"""
INTERLEAVED = """
at step 10: sigkill worker 1
at step 25: kill node 0
at step 30: add node
at step 45: drain node 1 deadline 8
at step 50: add node
at step 70: sigkill worker 0
at step 85: sigstop worker 1
at step 110: sigkill worker 0
at step 110: sigkill worker 1
"""
SCENARIOS = {
    "hosts removed": "at step 15: drain node 0 deadline 8",
    "a host added": "at step 10: kill node 1\nat step 25: add node",
    "a single rank left": "at step 15: sigkill worker 1\nat step 16: kill node 0",
    "all ranks lost at once": "at step 20: sigkill worker 0\nat step 20: sigkill worker 1",
    "below the minimum, then capacity again": "at step 15: kill node 1\nat step 15: add node",
}
ONCE_A_FAULT = """
from pathlib import Path

def before(step):
    marker = Path({marker!r})
    if step.index == 20 and not marker.exists():
        marker.touch()
        raise OSError("a fault of the user's code")
"""
ALWAYS_KILLED = """
import signal, time
from pathlib import Path

def before(step):
    if step.index == 12:
        while not any(Path({ledger!r}).glob("steps-*")):
            time.sleep(0.05)  # paces the looks
        signal.raise_signal(signal.SIGKILL)
"""

pytest.importorskip("horovod", reason="Horovod is not installed: make horovod")
pytestmark = pytest.mark.timeout(900)


def horovod_run(
    text: str, spot: Nodes, folder: Path, faults: str, *settings: str, script: Path | None = None, steps: int = STEPS
) -> str:
    """Run the job with `engine: horovod` under some faults and return its URL."""
    job = command(text, str(folder), "run", "engine=horovod", f"plan.max_steps={steps}", *settings, script=script)
    run_through(parse_faults(faults), spot, job, f"{folder}/run")
    return f"{folder}/run"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("faults", "steps"),
    [
        pytest.param(BRIEF, STEPS, id="brief"),
        pytest.param(INTERLEAVED, SCHEDULED_STEPS, id="interleaved", marks=pytest.mark.nightly),
    ],
)
def test_added_and_lost_hosts_and_ranks_do_not_change_the_run(
    spot: Nodes, text: str, alone: str, tmp_path: Path, faults: str, steps: int
) -> None:
    url = horovod_run(text, spot, tmp_path, faults, steps=steps)
    assert_certified(url, alone, steps)
    assert "the memory of a worker" in origins_in(url)
    sizes = set(read_run(open_store(url)).ledger.steps["world_size"].to_pylist())
    assert sizes == {1, 2}


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_scenario_changes_the_run(spot: Nodes, text: str, alone: str, tmp_path: Path, scenario: str) -> None:
    fewest = 2 if "minimum" in scenario else 1
    url = horovod_run(text, spot, tmp_path, SCENARIOS[scenario], f"workers.min={fewest}")
    assert_certified(url, alone, STEPS)
    if fewest == 2:
        assert waits_for_one_worker(events_in(url, StartEvent), events_in(url, WaitingEvent))


@pytest.mark.nightly
def test_a_failure_in_the_users_code_is_retried(spot: Nodes, text: str, alone: str, tmp_path: Path) -> None:
    script = wrapped(tmp_path, ONCE_A_FAULT.format(marker=str(tmp_path / "has-failed")))
    url = horovod_run(text, spot, tmp_path, "", script=script)
    assert_certified(url, alone, STEPS)
    assert any("a fault of the user's code" in crash.error for crash in events_in(url, CrashEvent))


@pytest.mark.nightly
def test_a_job_that_exceeds_max_failures_ends_with_a_valid_ledger(spot: Nodes, text: str, tmp_path: Path) -> None:
    have_nodes(spot, 2)
    settings = ("engine=horovod", "workers.max=2", "workers.max_failures=1", f"plan.max_steps={STEPS}")
    script = wrapped(tmp_path, ALWAYS_KILLED.format(ledger=f"{tmp_path}/run/ledger"))
    job = command(text, str(tmp_path), "run", *settings, script=script)
    driver = start_driver(job, spot.cluster, print)
    chaos = Chaos(spot, open_store(f"{tmp_path}/run"), driver)
    assert chaos.run((), limit_s=200) == 1
    assert "training failed" in " ".join(driver.lines)
    run = read_run(open_store(f"{tmp_path}/run"))
    steps = run.ledger.steps["step"].to_pylist()
    assert steps == list(
        range(len(steps))
    )  # the last rows of workers that are killed all at once may not have been written
    assert 0 < len(steps) <= 12
    certificate = certify(run, data_of(run))
    assert certificate.holds, certificate.difference


MAIN_JOB_STEPS = 100
TO_AND_FRO = """
at step 25: drain node 0 deadline 8
at step 35: add node
at step 75: sigkill worker 0
"""


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_full_size_main_job_has_the_losses_of_the_torch_engine(spot: Nodes, tmp_path: Path) -> None:
    stdlib_text().write(f"{tmp_path}/data")
    data = (f"data.train={tmp_path}/data/train", f"data.validation={tmp_path}/data/validation")
    losses = {}
    for name, engine, faults in (("torch", "torch", ""), ("alone", "horovod", ""), ("faults", "horovod", TO_AND_FRO)):
        settings = (f"name={name}", f"runs={tmp_path}", f"engine={engine}", f"plan.max_steps={MAIN_JOB_STEPS}")
        chaos = run_through(
            parse_faults(faults), spot, [sys.executable, str(SCRIPT), *settings, *data], f"{tmp_path}/{name}"
        )
        assert not chaos.pending
        run = read_run(open_store(f"{tmp_path}/{name}"))
        certificate = certify(run, data_of(run))
        assert certificate.holds, certificate.difference
        losses[name] = run.ledger.steps["loss"].to_pylist()
        print(name, set(run.ledger.steps["world_size"].to_pylist()), relative_difference(losses[name], losses["torch"]))
    assert relative_difference(losses["alone"], losses["torch"]) < 1e-5
    assert relative_difference(losses["faults"], losses["torch"]) < 1e-5
