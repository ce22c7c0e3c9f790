"""Tests of scenarios and their outcomes."""

import subprocess
import sys
from pathlib import Path

import pytest

from undula.errors import ClusterError, SpecError
from undula.testing import scenario
from undula.testing.chaos import Driver, InjectedFault
from undula.testing.scenario import from_faults, from_trace, outages

STEPS = [float(second) for second in range(10)] + [14.0, 15.0, 16.0, 18.5, 19.0]


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        ([3.5], [5.0]),
        ([3.5, 9.5], [1.0, 5.0]),
        ([9.5, 9.6, 13.0], [5.0]),  # one outage after three faults
        ([9.5, 16.2], [5.0, 2.5]),
        ([9.5, 14.2], [5.0, 2.5]),
        ([30.0], [0.0]),
        ([], []),
    ],
)
def test_an_outage_is_the_longest_time_without_a_step_before_the_next_fault(
    events: list[float], seconds: list[float]
) -> None:
    done = [InjectedFault(time, f"at {time}", number) for number, time in enumerate(events)]
    measured = outages(STEPS, done)
    assert [outage.seconds for outage in measured] == seconds
    assert [fault for outage in measured for fault in outage.faults] == [injected.fault for injected in done]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("at step 5: kill node 3", "there is no node 3; .* from 0 to 2"),
        ("at step 60: sigkill worker 0", "the job ends at step 60; .* plan.max_steps"),
    ],
)
def test_faults_that_cannot_happen_are_refused(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "faults.txt"
    path.write_text(f"at step 1: add node\n{line}\n")
    with pytest.raises(SpecError, match=f"faults.txt: '{line}': {problem}"):
        from_faults(path, first_nodes=2, steps=60)


def test_numbers_out_of_range_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"metadata": {"gap_seconds": 300}, "data": [1, 2, 3, 2]}')
    assert from_trace(path, 10, 2, 1, 20, 0).end_s == 60
    with pytest.raises(SpecError, match="--speedup is 0, which is out of range"):
        from_trace(path, 0, 2, None, 20, 0)
    with pytest.raises(
        SpecError, match=r"--changes is 2, but .*trace.json has only 1 changes up to 2 nodes \(workers.max\)"
    ):
        from_trace(path, 10, 2, 2, 20, 0)


def test_a_job_without_a_first_step_is_reported_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import sys; print('waiting', flush=True); sys.stdin.read()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(scenario, "FIRST_STEP_LIMIT_S", 1.0)
    driver = Driver(process, lambda line: None)
    with pytest.raises(ClusterError, match="no step within 1 s; the last lines of its output are: "):
        scenario._await_first_step(driver)
    driver.stop()
